package yamlconfig_test

import (
	"strings"
	"testing"
)

const small = `pools:
  - name: lobby
    targets: ["10.0.0.5:25565"]
listeners:
  - name: game
    bind: 0.0.0.0:25565
    protocol: tcp
    pool: lobby
`

func TestVariables(t *testing.T) {
	t.Setenv("GAME_PORT", "25570")
	t.Setenv("GAME_POOL", "lobby")
	t.Setenv("GAME_WORKERS", "3")
	t.Setenv("GAME_FLAG", "true")
	t.Setenv("GAME_EMPTY", "")
	t.Setenv("GAME_SECRET", "hunter2hunter2hunter2")
	for name, tc := range map[string]struct{ old, by, inJSON, want string }{
		"in a string":           {"bind: 0.0.0.0:25565", "bind: 0.0.0.0:${GAME_PORT}", `"tcp/0.0.0.0:25570"`, ""},
		"a whole string":        {"pool: lobby", "pool: ${GAME_POOL}", `"pool":"lobby"`, ""},
		"a number":              {"pools:", "settings: {workers: \"${GAME_WORKERS}\"}\npools:", `"workers":3`, ""},
		"a truth":               {"    pool: lobby", "    pool: lobby\n    route_hint: ${GAME_FLAG}", `"route_hint":true`, ""},
		"not read":              {"name: game\n", "name: game\n    prefix: $${GAME_PORT}\n", "", `"${GAME_PORT}"`},
		"missing":               {"pool: lobby", "pool: ${GAME_NONE}", "", "game.yaml:8:11: listeners[0].pool: the environment has no variable GAME_NONE"},
		"empty":                 {"pool: lobby", "pool: ${GAME_EMPTY}", "", "listeners[0].pool: is empty"},
		"with a default":        {"pool: lobby", "pool: ${GAME_POOL:-x}", "", "is no ${NAME}; write $${"},
		"without an end":        {"pool: lobby", "pool: ${GAME_POOL", "", "is no ${NAME}"},
		"a number of no digits": {"pools:", "settings: {workers: \"${GAME_POOL}\"}\npools:", "", "settings.workers: "},
		"a secret":              {"pool: lobby", "pool: ${GAME_SECRET}", "", `there is no pool "${GAME_SECRET}"`},
		"a secret in a part":    {"bind: 0.0.0.0:25565", "bind: ${GAME_SECRET}:1", "", `"${GAME_SECRET}" is not an IP address`},
		"a token":               {"pools:", "settings: {admin: {listen: \"0.0.0.0:9900\", auth_token: \"${GAME_SECRET}\"}}\npools:", `"token":"{env.GAME_SECRET}"`, ""},
		"a token with more":     {"pools:", "settings: {admin: {listen: \"0.0.0.0:9900\", auth_token: \"${GAME_EMPTY}short\"}}\npools:", "", "16 to 1024"},
	} {
		t.Run(name, func(t *testing.T) {
			out, _, err := adapt(changed(t, small, tc.old, tc.by))
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want %q", err, tc.want)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error tells a secret: %v", err)
			}
			if !strings.Contains(string(out), tc.inJSON) || strings.Contains(string(out), "hunter2") {
				t.Errorf("got %s, want %s in it and no secret", out, tc.inJSON)
			}
			if err == nil {
				if err := validate(out); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestAdmin tells what becomes of the admin address.
func TestAdmin(t *testing.T) {
	const (
		site    = `"http":{"servers":{"wayhouse_admin":{"automatic_https":{"disable":true},"listen":["ADDR"],"routes":[{"handle":[HANDLER]}]TLS}}}`
		off     = `"admin":{"disabled":true}`
		token   = `{"handler":"wayhouse_admin","tokens":[{"token":"0123456789abcdef"}]}`
		noToken = `{"handler":"wayhouse_admin"}`
	)
	on := func(addr, handler, tls string) string {
		return strings.NewReplacer("ADDR", addr, "HANDLER", handler, "TLS", tls).Replace(site)
	}
	for options, tc := range map[string]struct {
		want  []string
		warns bool
	}{
		`listen: "127.0.0.1:9900"`:                                         {[]string{`"admin":{"listen":"127.0.0.1:9900"}`}, false},
		`listen: "127.0.0.1:9900", auth_token: 0123456789abcdef`:           {[]string{off, on("127.0.0.1:9900", token, "")}, false},
		`listen: "0.0.0.0:9900", auth_token: 0123456789abcdef`:             {[]string{off, on("0.0.0.0:9900", token, "")}, false},
		`listen: "0.0.0.0:9900"`:                                           {[]string{off, on("0.0.0.0:9900", `{"handler":"wayhouse_admin","insecure_no_auth":true}`, "")}, true},
		`listen: "127.0.0.1:9900", tls: {cert: /a/c.pem, key: /a/key.pem}`: {[]string{off, on("127.0.0.1:9900", noToken, `,"tls_connection_policies":[{}]`), `"tls":{"certificates":{"load_files":[{"certificate":"/a/c.pem","key":"/a/key.pem"}]}}`}, false},
	} {
		out, warnings, err := adapt("settings: {admin: {" + options + "}}\n" + small)
		if err != nil || (len(warnings) > 0) != tc.warns {
			t.Errorf("%s: %v, warnings %v", options, err, warnings)
		}
		for _, want := range tc.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s: got %s, want %s in it", options, out, want)
			}
		}
		if err == nil && !strings.Contains(options, "tls") {
			if err := validate(out); err != nil {
				t.Errorf("%s: %v", options, err)
			}
		}
	}
}
