package pool

// Running returns the running pool of a name, of the newest config that has
// one; nil when there is none.
func Running(name string) *Pool { return newest(name) }
