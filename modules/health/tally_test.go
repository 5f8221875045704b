package health

import (
	"strings"
	"testing"
)

// In steps: + a check passes, - a check fails, f a flow fails, a a flow is
// answered. In want: U and D after the step, u and d where it has not changed.
func TestTally(t *testing.T) {
	for name, tc := range map[string]struct {
		rise, fall  int
		steps, want string
	}{
		"new backend":                         {2, 3, "+++", "uuu"},
		"falls at the third":                  {2, 3, "----", "uuDd"},
		"a pass in between":                   {2, 3, "--+---", "uuuuuD"},
		"rises at the second":                 {2, 3, "---+++", "uuDdUu"},
		"a failure in between":                {2, 3, "---+-++", "uuDdddU"},
		"one is enough":                       {1, 1, "-+-+", "DUDU"},
		"fall starts anew after rise":         {1, 3, "---+---", "uuDUuuD"},
		"failures while down do not add up":   {2, 3, "------++", "uuDddddU"},
		"flows count":                         {2, 3, "fff", "uuD"},
		"flows and checks count together":     {2, 3, "f-f", "uuD"},
		"an answer takes back flows":          {2, 3, "ffafff", "uuuuuD"},
		"an answer does not take back checks": {2, 3, "--a-", "uuuD"},
		"a check takes back flows":            {2, 3, "ff+ff", "uuuuu"},
		"an answer does not raise":            {2, 3, "---aaa", "uuDddd"},
		"flows left on it do not hold it":     {2, 3, "---f+f+", "uuDdddU"},
		"an answer when all is well":          {2, 3, "a-", "uu"},
	} {
		t.Run(name, func(t *testing.T) {
			var tally Tally
			r := Rules{tc.rise, tc.fall}
			var got strings.Builder
			for _, s := range tc.steps {
				changed := false
				switch s {
				case '+', '-':
					changed = tally.Checked(s == '+', r)
				case 'f':
					changed = tally.FlowFailed(r)
				case 'a':
					tally.FlowAnswered()
				}
				c := "u"
				if tally.Down {
					c = "d"
				}
				if changed {
					c = strings.ToUpper(c)
				}
				got.WriteString(c)
			}
			if got.String() != tc.want {
				t.Errorf("%s gives %s, want %s", tc.steps, got.String(), tc.want)
			}
		})
	}
}
