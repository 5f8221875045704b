package manifests

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	compose "github.com/compose-spec/compose-go/v2/types"
	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

const deploy = "../../../deploy"

func TestDockerfile(t *testing.T) {
	f, err := os.Open(deploy + "/docker/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ast, err := parser.Parse(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range ast.Warnings {
		t.Error(w.Short)
	}
	stages, _, err := instructions.Parse(ast.AST, linter.New(&linter.Config{Warn: func(rule, _, _, msg string, at []parser.Range) {
		t.Errorf("%v: %s: %s", at, rule, msg)
	}}))
	if err != nil {
		t.Fatal(err)
	}
	last := stages[len(stages)-1]
	if !strings.HasPrefix(last.BaseName, "gcr.io/distroless/static-") || !strings.HasSuffix(last.BaseName, ":nonroot") {
		t.Errorf("the image is made of %s", last.BaseName)
	}
	if stages[0].Platform != "$BUILDPLATFORM" {
		t.Errorf("the build runs on %q and not on the machine's own architecture", stages[0].Platform)
	}
	var user, entry, health string
	for _, c := range last.Commands {
		switch c := c.(type) {
		case *instructions.UserCommand:
			user = c.User
		case *instructions.EntrypointCommand:
			entry = fmt.Sprint(c.PrependShell, c.CmdLine)
		case *instructions.HealthCheckCommand:
			health = fmt.Sprint(c.Health.Test)
		case *instructions.RunCommand:
			t.Errorf("an image without a shell cannot run %v", c.CmdLine)
		}
	}
	if user != "65532:65532" || entry != "false [/usr/bin/wayhouse]" || health != "[CMD /usr/bin/wayhouse health]" {
		t.Errorf("user %s, entrypoint %s, health check %s", user, entry, health)
	}
}

func TestCompose(t *testing.T) {
	dir, err := filepath.Abs(deploy + "/compose")
	if err != nil {
		t.Fatal(err)
	}
	project, err := loader.LoadWithContext(t.Context(), compose.ConfigDetails{
		WorkingDir:  dir,
		ConfigFiles: []compose.ConfigFile{{Filename: filepath.Join(dir, "compose.yaml")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := project.ServiceNames(); !slices.Equal(got, []string{"game-a", "game-b", "grafana", "prometheus", "wayhouse"}) {
		t.Errorf("the services are %v", got)
	}
	for _, s := range project.Services {
		for _, v := range s.Volumes {
			if v.Type != compose.VolumeTypeBind {
				continue
			}
			if _, err := os.Stat(v.Source); err != nil {
				t.Errorf("%s mounts %v", s.Name, err)
			}
		}
		for _, p := range s.Ports {
			if p.HostIP != "127.0.0.1" {
				t.Errorf("the demo opens port %s of %s to others than this host", p.Published, s.Name)
			}
		}
		if s.Build != nil {
			if _, err := os.Stat(filepath.Join(s.Build.Context, s.Build.Dockerfile)); err != nil {
				t.Errorf("%s is built of %v", s.Name, err)
			}
			if s.User != "" || s.Privileged || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Equal(s.CapAdd, []string{"NET_BIND_SERVICE"}) {
				t.Errorf("%s may do more than it needs", s.Name)
			}
		}
	}
}

// manifest decodes the documents of a file strictly, each as what its kind says.
func manifest(t *testing.T, name string) (all []any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(deploy, "k8s", name))
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range bytes.Split(b, []byte("\n---\n")) {
		var meta struct{ APIVersion, Kind string }
		if err := yaml.Unmarshal(doc, &meta); err != nil {
			t.Fatal(err)
		}
		var v any
		switch meta.APIVersion + " " + meta.Kind {
		case "v1 Namespace":
			v = new(core.Namespace)
		case "v1 ServiceAccount":
			v = new(core.ServiceAccount)
		case "v1 Secret":
			v = new(core.Secret)
		case "v1 ConfigMap":
			v = new(core.ConfigMap)
		case "v1 Service":
			v = new(core.Service)
		case "apps/v1 DaemonSet":
			v = new(apps.DaemonSet)
		case "rbac.authorization.k8s.io/v1 ClusterRole":
			v = new(rbac.ClusterRole)
		case "rbac.authorization.k8s.io/v1 RoleBinding":
			v = new(rbac.RoleBinding)
		default:
			t.Fatalf("%s has a %s %s", name, meta.APIVersion, meta.Kind)
		}
		if err := yaml.UnmarshalStrict(doc, v); err != nil {
			t.Errorf("%s %s: %v", name, meta.Kind, err)
		}
		all = append(all, v)
	}
	return all
}

// one is the document of a type.
func one[T any](t *testing.T, all []any) *T {
	t.Helper()
	for _, v := range all {
		if v, ok := v.(*T); ok {
			return v
		}
	}
	t.Fatalf("there is no %T", *new(T))
	return nil
}

func TestKubernetes(t *testing.T) {
	all := manifest(t, "wayhouse.yaml")
	set := one[apps.DaemonSet](t, all)
	pod := set.Spec.Template.Spec
	if len(pod.Containers) != 1 || !pod.HostNetwork || pod.DNSPolicy != core.DNSClusterFirstWithHostNet {
		t.Fatalf("the pod is %+v", pod)
	}
	c := pod.Containers[0]

	ports := make(map[string]int32)
	for _, p := range c.Ports {
		ports[p.Name] = p.ContainerPort
		if p.HostPort != p.ContainerPort {
			t.Errorf("port %s of a pod in the node's network has another number there", p.Name)
		}
	}
	config := one[core.ConfigMap](t, all).Data["Caddyfile"]
	if want := fmt.Sprintf("\nhttp://:%d {\n", ports["admin"]); !strings.Contains(config, want) {
		t.Errorf("the config has no site %q", want)
	}
	for path, probe := range map[string]*core.Probe{"/healthz": c.LivenessProbe, "/readyz": c.ReadinessProbe} {
		if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != path || ports[probe.HTTPGet.Port.StrVal] == 0 {
			t.Errorf("the probe of %s is %+v", path, probe)
		}
	}
	if s := one[core.Service](t, all); s.Spec.ClusterIP != "None" || ports[s.Spec.Ports[0].TargetPort.StrVal] != s.Spec.Ports[0].Port {
		t.Errorf("the service is %+v", s.Spec)
	}

	mounts := make(map[string]bool)
	for _, m := range c.VolumeMounts {
		mounts[m.Name] = true
	}
	for _, v := range pod.Volumes {
		if !mounts[v.Name] {
			t.Errorf("the volume %s is mounted nowhere", v.Name)
		}
		delete(mounts, v.Name)
	}
	if len(mounts) > 0 {
		t.Errorf("there are no volumes %v", mounts)
	}
	tokens := one[core.Secret](t, all)
	for name := range tokens.StringData {
		if !strings.Contains(config, "{file./run/secrets/wayhouse/"+name+"}") {
			t.Errorf("the config does not use the token %s", name)
		}
	}
	sc := c.SecurityContext
	if !*pod.SecurityContext.RunAsNonRoot || !*sc.ReadOnlyRootFilesystem || sc.Privileged != nil ||
		!slices.Equal(sc.Capabilities.Drop, []core.Capability{"ALL"}) || !slices.Equal(sc.Capabilities.Add, []core.Capability{"NET_BIND_SERVICE"}) {
		t.Errorf("the container may do more than it needs: %+v %+v", pod.SecurityContext, sc)
	}

	// preStop and the grace of the config together are within what Kubernetes waits.
	if got := fmt.Sprint(c.Lifecycle.PreStop.Exec.Command); got != "[/usr/bin/wayhouse drain --wait=30s]" ||
		!strings.Contains(config, "shutdown_grace 10m\n") || *pod.TerminationGracePeriodSeconds < 30+600+10 {
		t.Errorf("preStop is %s, within %d s", got, *pod.TerminationGracePeriodSeconds)
	}

	account, binding, role := one[core.ServiceAccount](t, all), one[rbac.RoleBinding](t, all), one[rbac.ClusterRole](t, all)
	if pod.ServiceAccountName != account.Name || binding.Subjects[0].Name != account.Name || binding.Subjects[0].Namespace != account.Namespace || binding.RoleRef.Name != role.Name {
		t.Errorf("the pod's account is not the one with the role: %+v", binding)
	}
	for _, r := range role.Rules {
		if !slices.Equal(r.Verbs, []string{"list", "watch"}) {
			t.Errorf("the role may %v %v", r.Verbs, r.Resources)
		}
	}
}
