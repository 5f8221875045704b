package wasm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/sys"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// A call:
//
//	Sniff → breaker → slot → fresh instance → alloc, copy → sniff → decode
//
// It runs in the goroutine of the flow, which holds nobody else up. Slots keep
// a core free for the data path whatever modules do. The time of a call begins
// when it has its slot.

// sniffer is a module under a name, with the configuration string of a config.
type sniffer struct {
	name    string
	config  []byte
	limits  limits
	engine  *engine
	module  *module
	breaker *breaker
	logger  *zap.Logger

	mu     sync.RWMutex // held by calls, so that the module outlives them
	closed bool
}

// newSniffer takes over the caller's reference to m.
func (e *engine) newSniffer(name, config string, m *module, l limits, logger *zap.Logger) *sniffer {
	s := &sniffer{name: name, config: []byte(config), limits: l, engine: e, module: m, breaker: e.breaker(m, name), logger: logger}
	e.mu.Lock()
	e.live = append(e.live, s)
	e.mu.Unlock()
	return s
}

// close waits for calls to end and gives the module back. Flows that have begun
// under a config that is gone may still call; see Sniff.
func (s *sniffer) close() {
	s.engine.mu.Lock()
	s.engine.live = slices.DeleteFunc(s.engine.live, func(l *sniffer) bool { return l == s })
	s.engine.mu.Unlock()
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.engine.unload(s.module)
}

// named is the sniffer of that name that has lived longest, nil when there is
// none. It is never one that is closed already.
func (e *engine) named(name string) *sniffer {
	e.mu.Lock()
	defer e.mu.Unlock()
	if i := slices.IndexFunc(e.live, func(s *sniffer) bool { return s.name == name }); i >= 0 {
		return e.live[i]
	}
	return nil
}

// OneLook implements sniff.OneLook: the answer 0 does not say whether more
// bytes could change it.
func (s *sniffer) OneLook() {}

// Sniff implements sniff.Sniffer. What is no answer of the module's leaves the
// flow undecided, so that it does not reach a laxer route by a failure. A flow
// that a reload has overtaken before its bytes came is judged by the sniffer
// that has the name now.
func (s *sniffer) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	for s := s; s != nil; s = s.engine.named(s.name) {
		if v, answered := s.ask(in, h); answered {
			return v
		}
	}
	return fault(h, sniff.Busy)
}

// ask is Sniff of one that may be closed, which gives no answer.
func (s *sniffer) ask(in *sniff.Input, h *sniff.Hint) (v sniff.Verdict, answered bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return v, false
	}
	ok, probe := s.breaker.allow(time.Now())
	if !ok {
		return fault(h, sniff.Broken), true
	}
	if !s.engine.takeSlot(s.limits.timeout) {
		s.breaker.cancel(probe)
		return fault(h, sniff.Busy), true
	}
	recognised, f, err := s.call(in.Bytes, h) // gives the slot back
	if err != nil {
		if c := s.logger.Check(zap.DebugLevel, "sniffer failed"); c != nil {
			c.Write(zap.String("sniffer", s.name), zap.Error(err))
		}
	}
	weight := 0
	switch f {
	case sniff.Timeout:
		weight = weightTimeout
	case sniff.Trap:
		weight = weightTrap
	}
	if s.breaker.done(time.Now(), probe, weight) {
		s.log(err)
	}
	switch {
	case f != sniff.NoFault:
		return fault(h, f), true
	case recognised:
		return sniff.Recognised, true
	}
	return sniff.Unrecognised, true
}

// log tells that the breaker has opened, by err, or closed.
func (s *sniffer) log(err error) {
	if err == nil {
		s.logger.Info("sniffer works again", zap.String("sniffer", s.name))
		return
	}
	s.logger.Warn("sniffer fails too often and is not called for a while",
		zap.String("sniffer", s.name), zap.Error(err), zap.Duration("retry_in", minBreak))
}

func fault(h *sniff.Hint, f sniff.Fault) sniff.Verdict {
	h.Reset()
	h.Fault = f
	return sniff.Undecided
}

// takeSlot waits for a slot, for at most as long as a call may take.
func (e *engine) takeSlot(wait time.Duration) bool {
	select {
	case e.slots <- struct{}{}:
		return true
	default:
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case e.slots <- struct{}{}:
		return true
	case <-timer.C:
		return false
	}
}

// No module can ask for random numbers. The source is named because wazero seeds
// one of its own for every instance otherwise, which takes longer than a call.
var instanceConfig = wazero.NewModuleConfig().WithName("").WithStartFunctions().WithRandSource(rand.Reader)

// run makes an instance and has it used, all within the limits. f may be nil. It
// is for who holds a slot, which is given back when the memory is clean: that
// takes about as long as a call, and nobody waits for it.
func (e *engine) run(m *module, l limits, f func(context.Context, api.Module) error) (err error) {
	mem, err := e.takeMemory(l.memory)
	if err != nil {
		<-e.slots
		return err
	}
	defer func() { // last, for nothing may use the memory any more
		go func() {
			e.giveMemory(mem)
			<-e.slots
		}()
	}()
	ctx, cancel := context.WithTimeout(mem.ctx, l.timeout)
	defer cancel()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	instance, err := e.runtime.InstantiateModule(ctx, m.compiled, instanceConfig)
	if err != nil {
		return err
	}
	defer instance.Close(ctx)
	if f == nil {
		return nil
	}
	return f(ctx, instance)
}

// instantiate tries a module without calling it.
func (e *engine) instantiate(m *module, l limits) error {
	e.slots <- struct{}{}
	return e.run(m, l, nil)
}

var errOutput = errors.New("bad output")

// call asks the module about in. The error is for operators.
func (s *sniffer) call(in []byte, h *sniff.Hint) (recognised bool, f sniff.Fault, err error) {
	err = s.engine.run(s.module, s.limits, func(ctx context.Context, instance api.Module) error {
		mem := instance.Memory()
		var stack [4]uint64
		for i, region := range [2][]byte{in, s.config} {
			if len(region) == 0 {
				continue
			}
			arg := [1]uint64{uint64(len(region))}
			if err := instance.ExportedFunction("alloc").CallWithStack(ctx, arg[:]); err != nil {
				return err
			}
			at := uint32(arg[0])
			if !mem.Write(at, region) {
				return fmt.Errorf("%w: alloc(%d) gives %#x, the memory has %#x bytes", errOutput, len(region), at, mem.Size())
			}
			stack[2*i], stack[2*i+1] = uint64(at), uint64(len(region))
		}
		if err := instance.ExportedFunction("sniff").CallWithStack(ctx, stack[:]); err != nil {
			return err
		}
		result := stack[0]
		if result == 0 {
			return nil
		}
		hint, ok := mem.Read(uint32(result>>32), uint32(result))
		if !ok {
			return fmt.Errorf("%w: the hint at %#x of %#x bytes is not in the memory", errOutput, result>>32, uint32(result))
		}
		if !decode(hint, h) {
			return fmt.Errorf("%w: the hint cannot be decoded", errOutput)
		}
		recognised = true
		return nil
	})
	var exit *sys.ExitError
	switch {
	case err == nil:
	case errors.Is(err, errOutput):
		f = sniff.BadOutput
	case errors.As(err, &exit) && exit.ExitCode() == sys.ExitCodeDeadlineExceeded, errors.Is(err, context.DeadlineExceeded):
		f = sniff.Timeout
	default:
		f = sniff.Trap
	}
	return recognised, f, err
}
