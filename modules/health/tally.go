package health

// Rules are how many results in a row change a backend's health.
type Rules struct{ Rise, Fall int }

// Tally counts the evidence about one backend. Its zero value is a backend that
// is up and of which nothing is known, so a new backend takes flows at once.
type Tally struct {
	Down bool

	failed  int // checks, in a row
	passed  int // checks, in a row, while down
	passive int // failures of flows since a flow or a check succeeded
}

// Checked adds the result of a check and reports whether Down has changed.
func (t *Tally) Checked(ok bool, r Rules) bool {
	if !ok {
		t.passed = 0
		t.failed++
		return t.fall(r)
	}
	t.failed, t.passive = 0, 0
	if !t.Down {
		return false
	}
	t.passed++
	if t.passed < r.Rise {
		return false
	}
	*t = Tally{}
	return true
}

// FlowFailed adds the failure of a flow, which counts toward fall like that of
// a check, and reports whether Down has changed. Once a backend is down only
// checks speak: flows that were left on it must not keep it there.
func (t *Tally) FlowFailed(r Rules) bool {
	if t.Down {
		return false
	}
	t.passive++
	return t.fall(r)
}

// FlowAnswered takes back what failures of flows have added. It does not speak
// against checks: a backend that they hold down stays down.
func (t *Tally) FlowAnswered() { t.passive = 0 }

// Suspect reports whether FlowAnswered would change anything.
func (t *Tally) Suspect() bool { return t.passive > 0 }

func (t *Tally) fall(r Rules) bool {
	if t.Down || t.failed+t.passive < r.Fall {
		return false
	}
	*t = Tally{Down: true}
	return true
}
