package proxy

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/offload"
	"github.com/wayhouse-proxy/wayhouse/modules/overload"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// Start starts the pools' work, binds what the config before does not have,
// then lets new flows follow this config. It changes nothing when it fails.
func (a *App) Start() (err error) {
	workers := a.Workers
	if workers == 0 {
		workers = min(runtime.GOMAXPROCS(0), maxWorkers)
	}
	if a.engines, err = listener.AcquireEngines(workers, processLog); err != nil {
		return err
	}
	var opened []*listener.Listener
	var running []*pool.Pool
	var begun []*listener.Listener
	var kernel *offload.Kernel
	acquired := false
	traces := false
	defer func() {
		if err == nil {
			return
		}
		if traces {
			err = errors.Join(err, tracing.Release())
		}
		if kernel != nil {
			err = errors.Join(err, offload.Release())
		}
		for _, l := range opened {
			err = errors.Join(err, l.Close())
		}
		for _, l := range begun {
			l.End()
		}
		for _, p := range running {
			p.Stop()
		}
		if acquired {
			err = errors.Join(err, intent.Process.Release(a.stateDir))
		}
		a.engines = nil
		err = errors.Join(err, listener.ReleaseEngines())
	}()
	if err = a.checkOtherApps(); err != nil {
		return err
	}
	if a.Tracing != nil {
		if err := tracing.Acquire(processLog.Named("tracing")); err != nil {
			return fmt.Errorf("tracing: %w", err)
		}
		traces = true
	}
	if got := a.engines.TCP.Workers(); got != workers {
		a.logger.Warn("the number of workers changes with the next start of the process", zap.Int("running", got), zap.Int("configured", workers))
	}
	if err = intent.Process.Acquire(a.stateDir, processLog.Named("intent")); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	acquired = true
	if kernel, err = a.acquireOffload(); err != nil {
		return err
	}
	if running, err = a.startPools(); err != nil { // may wait for DNS, with nothing bound yet
		return err
	}
	if begun, err = a.beginListeners(); err != nil { // may wait for lists
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(a.Listeners)) {
		l := a.Listeners[name]
		if err := l.Open(a.engines, a.binds); err != nil {
			return err
		}
		opened = append(opened, l)
	}
	if kernel != nil {
		a.shields = a.shield(kernel, opened)
	}
	a.logSessions() // nothing fails any more
	for _, l := range opened {
		l.Serve()
		a.logger.Info("listening", zap.String("listener", l.Name()), zap.Stringers("local", l.Bound()))
	}
	close(a.bound)
	if a.shields != nil {
		a.shields.Serve()
	}
	instances.started(a)
	a.followSessions(a.engines)
	a.overload = overload.Start(a.Limits.Overload, a.Limits.Flows, a.logger)
	signals.acquire()
	return nil
}

// startPools starts all pools at once, for each may wait a second for its host
// names, and returns those that run.
func (a *App) startPools() (running []*pool.Pool, err error) {
	var wg sync.WaitGroup
	var mu sync.Mutex // guards running and err
	for _, p := range a.pools {
		wg.Go(func() {
			perr := p.Start()
			mu.Lock()
			defer mu.Unlock()
			if perr != nil {
				err = errors.Join(err, fmt.Errorf("pools.%s: %w", p.Name(), perr))
				return
			}
			running = append(running, p)
		})
	}
	wg.Wait()
	return running, err
}

// beginListeners begins with all listeners at once, and returns those that it
// did with.
func (a *App) beginListeners() (begun []*listener.Listener, err error) {
	var wg sync.WaitGroup
	var mu sync.Mutex // guards begun and err
	for _, l := range a.Listeners {
		wg.Go(func() {
			lerr := l.Begin()
			mu.Lock()
			defer mu.Unlock()
			if lerr != nil {
				err = errors.Join(err, lerr)
				return
			}
			begun = append(begun, l)
		})
	}
	wg.Wait()
	return begun, err
}

// Stop ends what Start began. Flows live on: on a reload under the config that
// has started meanwhile, at the end of the process until they end or the grace
// has passed.
func (a *App) Stop() error {
	if a.engines == nil {
		return nil
	}
	if caddy.Exiting() {
		a.shutDown()
	}
	instances.stopped(a)
	a.overload.Stop()
	if a.endFollowing != nil {
		a.endFollowing()
	}
	var errs []error
	if a.shields != nil {
		a.shields.Close()
		errs = append(errs, offload.Release())
	}
	for _, l := range a.Listeners {
		errs = append(errs, l.Close())
		l.End()
	}
	for _, p := range a.pools {
		p.Stop()
	}
	errs = append(errs, intent.Process.Release(a.stateDir))
	signals.release()
	if a.Tracing != nil {
		errs = append(errs, tracing.Release())
	}
	a.leaveSessionLog()
	a.leave()
	return errors.Join(errs...)
}
