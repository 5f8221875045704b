package testkit

import "maps"

// Apps is a config of apps.
func Apps(apps M) M { return M{"apps": apps} }

// App is a config of the wayhouse app alone, with its listeners, pools and
// other options. Flows get a second at the end of the process, so that tests
// that leave some do not wait for them.
func App(listeners, pools M, options ...M) M {
	app := M{"listeners": listeners, "pools": pools, "shutdown_grace": "1s"}
	for _, o := range options {
		maps.Copy(app, o)
	}
	return Apps(M{"wayhouse": app})
}

// Pool is a pool without health checks.
func Pool(targets ...string) M { return M{"targets": targets, "health": M{"check": "none"}} }

// With is m with more keys.
func With(m M, more M) M {
	m = maps.Clone(m)
	maps.Copy(m, more)
	return m
}

// ToPool is a listener that sends everything to a pool.
func ToPool(pool string, binds ...string) M {
	return Listener(binds, Route(M{"handler": "pool", "pool": pool}))
}

// Listener is a listener with routes.
func Listener(binds []string, routes ...M) M {
	l := M{"bind": binds}
	if len(routes) > 0 {
		l["routes"] = routes
	}
	return l
}

// Route is a route without matchers.
func Route(handlers ...M) M { return M{"handle": handlers} }

// Match is a route with one set of matchers.
func Match(matchers M, handlers ...M) M { return M{"match": A{matchers}, "handle": handlers} }
