package kube

import (
	"encoding/base64"
	"errors"
	"fmt"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// kubeconfig is what a context of such a file says.
type kubeconfig struct {
	access    fetch.Access
	namespace string // "" when it names none
}

// kubeconfigFile has the keys that matter: those that are used, and those that
// must not be passed over.
type kubeconfigFile struct {
	CurrentContext string `yaml:"current-context"`
	Contexts       []struct {
		Name    string
		Context struct{ Cluster, User, Namespace string }
	}
	Clusters []struct {
		Name    string
		Cluster cluster
	}
	Users []struct {
		Name string
		User user
	}
}

type cluster struct {
	Server     string
	CA         string `yaml:"certificate-authority"`
	CAData     string `yaml:"certificate-authority-data"`
	ServerName string `yaml:"tls-server-name"`
	Insecure   bool   `yaml:"insecure-skip-tls-verify"`
	Proxy      string `yaml:"proxy-url"`
}

type user struct {
	Token        string
	TokenFile    string `yaml:"tokenFile"`
	Cert         string `yaml:"client-certificate"`
	CertData     string `yaml:"client-certificate-data"`
	Key          string `yaml:"client-key"`
	KeyData      string `yaml:"client-key-data"`
	Username     string
	As           string
	Exec         yaml.Node
	AuthProvider yaml.Node `yaml:"auth-provider"`
}

// readKubeconfig reads a file; context "" is its current one.
func readKubeconfig(path, context string) (*kubeconfig, error) {
	b, err := fetch.File(path)
	if err != nil {
		return nil, err
	}
	k, err := parseKubeconfig(b, filepath.Dir(path), context)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return k, nil
}

// parseKubeconfig reads a file that stands in dir.
func parseKubeconfig(b []byte, dir, context string) (*kubeconfig, error) {
	var file kubeconfigFile
	if err := yaml.Unmarshal(b, &file); err != nil {
		return nil, errors.New("this is not the YAML of a kubeconfig") // the error may quote a token
	}
	if context == "" {
		if context = file.CurrentContext; context == "" {
			return nil, errors.New("it has no current-context: name one, as in kubeconfig FILE CONTEXT")
		}
	}
	var contexts, clusters, users []string
	for _, c := range file.Contexts {
		if contexts = append(contexts, c.Name); c.Name != context {
			continue
		}
		k := &kubeconfig{namespace: c.Context.Namespace}
		for _, e := range file.Clusters {
			if clusters = append(clusters, e.Name); e.Name != c.Context.Cluster {
				continue
			}
			if err := e.Cluster.access(&k.access, dir); err != nil {
				return nil, fmt.Errorf("cluster %s: %w", e.Name, err)
			}
		}
		if k.access.URL == nil {
			return nil, fmt.Errorf("context %s: no cluster is named %q; %s", context, c.Context.Cluster, suggest.Hint(c.Context.Cluster, clusters))
		}
		if c.Context.User == "" {
			return k, nil
		}
		for _, e := range file.Users {
			if users = append(users, e.Name); e.Name != c.Context.User {
				continue
			}
			if err := e.User.access(&k.access, dir); err != nil {
				return nil, fmt.Errorf("user %s: %w", e.Name, err)
			}
			return k, nil
		}
		return nil, fmt.Errorf("context %s: no user is named %q; %s", context, c.Context.User, suggest.Hint(c.Context.User, users))
	}
	return nil, fmt.Errorf("no context is named %q; %s", context, suggest.Hint(context, contexts))
}

func (c *cluster) access(to *fetch.Access, dir string) (err error) {
	u, err := parseAPI(c.Server)
	switch {
	case err != nil:
		return fmt.Errorf("server: %w", err)
	case c.Insecure:
		return errors.New("insecure-skip-tls-verify: whoever answers would get the token; give certificate-authority instead")
	case c.Proxy != "":
		return errors.New("proxy-url: proxies are not used")
	}
	if to.Roots, err = inline(c.CAData, c.CA, dir); err != nil {
		return fmt.Errorf("certificate-authority: %w", err)
	}
	to.URL, to.ServerName = u, c.ServerName
	return nil
}

func (u *user) access(to *fetch.Access, dir string) (err error) {
	switch {
	case !u.Exec.IsZero():
		return errors.New("exec: no programs are run for credentials; use a service account's token")
	case !u.AuthProvider.IsZero():
		return errors.New("auth-provider: it is not supported; use a service account's token")
	case u.Username != "":
		return errors.New("username: passwords are not sent; use a service account's token")
	case u.As != "":
		return errors.New("as: nobody is impersonated; use the account itself")
	}
	switch {
	case u.TokenFile != "": // of the two, the one that can be renewed
		if to.Token, err = fetch.TokenFile(in(dir, u.TokenFile)); err != nil {
			return fmt.Errorf("tokenFile: %w", err)
		}
	case u.Token != "":
		if to.Token, err = fetch.Token("it", []byte(u.Token)); err != nil {
			return fmt.Errorf("token: %w", err)
		}
	}
	if to.Cert, err = inline(u.CertData, u.Cert, dir); err != nil {
		return fmt.Errorf("client-certificate: %w", err)
	}
	if to.Key, err = inline(u.KeyData, u.Key, dir); err != nil {
		return fmt.Errorf("client-key: %w", err)
	}
	if (to.Cert == nil) != (to.Key == nil) {
		return errors.New("client-certificate and client-key go together")
	}
	return nil
}

// inline is what data has, in base64, or else a file; nil when there is neither.
func inline(data, path, dir string) ([]byte, error) {
	switch {
	case data != "":
		b, err := base64.StdEncoding.DecodeString(data)
		if err != nil {
			return nil, errors.New("the data is not base64")
		}
		return b, nil
	case path != "":
		return fetch.File(in(dir, path))
	}
	return nil, nil
}

// in is a path as seen from a directory.
func in(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}
