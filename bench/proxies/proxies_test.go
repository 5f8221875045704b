package proxies

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

func TestConfigurationsHaveAllAddresses(t *testing.T) {
	params := Params{
		Dir: t.TempDir(), TCP: "127.0.0.1:1001", UDP: "127.0.0.1:1002",
		TCPBackends: []string{"127.0.2.1:1003", "127.0.2.2:1004"}, UDPBackend: "127.0.2.1:1005",
	}
	for _, p := range All {
		t.Run(p.Name, func(t *testing.T) {
			b, err := p.render(params)
			if err != nil {
				t.Fatal(err)
			}
			want := append([]string{params.TCP}, params.TCPBackends...)
			if p.UDP {
				want = append(want, params.UDP, params.UDPBackend)
			}
			for _, addr := range want {
				if strings.Count(string(b), addr) != 1 {
					t.Errorf("%s is not there once:\n%s", addr, b)
				}
			}
			if filepath.Ext(p.config) == ".json" && !json.Valid(b) {
				t.Errorf("not JSON:\n%s", b)
			}
			if argv, err := p.Prepare("/bin/x", params); err != nil || argv[0] != "/bin/x" {
				t.Errorf("Prepare = %q, %v", argv, err)
			}
			if ByName(p.Name) != p {
				t.Errorf("ByName does not find it")
			}
		})
	}
	if ByName("no such proxy") != nil {
		t.Error("ByName finds what is not there")
	}
}
