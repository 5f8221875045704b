package adminapi

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
)

// Token is a secret that opens the admin API.
type Token struct {
	// The secret: 16 to 1024 visible ASCII characters. {env.NAME} is read when the
	// config is loaded. {file.PATH}, when it is the whole value, is read then and
	// again every minute, so that it can be changed without a reload; a file that
	// cannot be read any more or has no token in it leaves the last one in force.
	Token string `json:"token,omitempty"`

	// What it is good for: read, operate or admin, each with all of those before
	// it. Default: admin.
	Role string `json:"role,omitempty"`

	// Who uses it, for the log and for changes that are kept, where the request has
	// no X-Actor. Default: the role.
	Name string `json:"name,omitempty"`
}

const (
	minToken = 16
	maxToken = 1024
)

// digest is what is kept of a token.
type digest [sha256.Size]byte

// secret is a token that has been read.
type secret struct {
	digest digest
	role   role
	name   string
	file   string // to read it again from; "": it is fixed
}

var (
	fileToken = regexp.MustCompile(`^\{file\.([^{}]+)\}$`)
	envToken  = regexp.MustCompile(`^\{env\.[^{}]+\}$`)
)

// secret reads the token.
func (t *Token) secret() (*secret, error) {
	s := new(secret)
	var err error
	if s.role, err = parseRole(t.Role); err != nil {
		return nil, fmt.Errorf("role: %w", err)
	}
	s.name = cmp.Or(printable(t.Name), s.role.String())
	if m := fileToken.FindStringSubmatch(t.Token); m != nil {
		s.file = m[1]
		s.digest, err = readToken(s.file)
	} else {
		s.digest, err = resolveToken(t.Token)
	}
	if err != nil {
		return nil, fmt.Errorf("token: %w", err)
	}
	return s, nil
}

// resolveToken reads a token that stands in the config or the environment.
func resolveToken(text string) (digest, error) {
	if text == "" {
		return digest{}, errors.New("missing")
	}
	value, err := caddy.NewReplacer().ReplaceOrErr(text, true, true)
	switch {
	case err != nil && envToken.MatchString(text):
		return digest{}, fmt.Errorf("%s is not set, or empty", text)
	case err != nil: // names a part of the text, which may be one of the secret
		return digest{}, errors.New("what is in braces is no placeholder that is known, or is empty; write \\{ for a brace of the token's own")
	}
	return digestOf(value)
}

// readToken reads a file with a token and nothing more, but for a line break.
func readToken(file string) (digest, error) {
	b, err := fetch.File(file)
	if err != nil {
		return digest{}, err
	}
	d, err := digestOf(strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r"))
	if err != nil {
		return digest{}, fmt.Errorf("%s: %w", file, err)
	}
	return d, nil
}

// digestOf checks a token. Errors do not tell it.
func digestOf(token string) (digest, error) {
	switch {
	case token == "":
		return digest{}, errors.New("is empty")
	case len(token) < minToken:
		return digest{}, fmt.Errorf("%d bytes are fewer than %d", len(token), minToken)
	case len(token) > maxToken:
		return digest{}, fmt.Errorf("is longer than %d bytes", maxToken)
	case strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return digest{}, errors.New("has characters that are not visible ASCII, which no header can carry")
	}
	return sha256.Sum256([]byte(token)), nil
}
