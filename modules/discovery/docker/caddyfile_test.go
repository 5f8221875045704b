package docker

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"docker wayhouse.pool=lobby":                         `{"labels":["wayhouse.pool=lobby"]}`,
		"docker a {\n label b c\n label d=e\n}":              `{"labels":["a","b","c","d=e"]}`,
		"docker {\n endpoint tcp://docker:2375\n}":           `{"endpoint":"tcp://docker:2375"}`,
		"docker {\n ca_file a\n cert_file b\n key_file c\n}": `{"ca_file":"a","cert_file":"b","key_file":"c"}`,
		"docker {\n prefix query\n port 7777/udp\n}":         `{"prefix":"query","port":"7777/udp"}`,
		"docker {\n network games\n family ipv6\n}":          `{"network":"games","family":"ipv6"}`,
		"docker {\n published\n host_address 10.0.0.5\n}":    `{"published":true,"host_address":"10.0.0.5"}`,
		"docker {\n any_health\n on_empty withdraw\n}":       `{"any_health":true,"on_empty":"withdraw"}`,
		"docker {\n refresh_interval 30s\n}":                 `{"refresh_interval":30000000000}`,
		"docker {\n family v6\n}":                            `family: "v6" is none of ipv4, ipv6`,
		"docker {\n label\n}":                                `label: a value is missing`,
		"docker {\n published yes\n}":                        `published: unexpected argument "yes"`,
		"docker {\n host 10.0.0.5\n}":                        `unrecognized option "host" of the source docker`,
		"docker {\n network a\n network b\n}":                `network: given twice`,
	} {
		d := new(Source)
		err := d.UnmarshalCaddyfile(caddyfile.NewTestDispenser(in))
		var got string
		if err != nil {
			got = err.Error()
		} else {
			b, err := json.Marshal(d)
			if err != nil {
				t.Fatal(err)
			}
			got = string(b)
		}
		if err == nil && !sameJSON(t, got, want) || err != nil && !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func sameJSON(t *testing.T, a, b string) bool {
	t.Helper()
	var x, y map[string]any
	if json.Unmarshal([]byte(a), &x) != nil || json.Unmarshal([]byte(b), &y) != nil {
		return false
	}
	ax, _ := json.Marshal(x)
	by, _ := json.Marshal(y)
	return string(ax) == string(by)
}
