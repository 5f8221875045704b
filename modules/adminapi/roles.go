package adminapi

import (
	"errors"
	"net/http"
)

// role is what a token is good for. Each has all that those before it have.
type role int

const (
	nobody  role = iota // for calls without a token
	reader              // look
	operate             // and move flows and backends
	admin               // and change what runs
)

var roleNames = [...]string{nobody: "none", reader: "read", operate: "operate", admin: "admin"}

func (r role) String() string { return roleNames[r] }

// parseRole reads a role as the config has it.
func parseRole(s string) (role, error) {
	switch s {
	case "read":
		return reader, nil
	case "operate":
		return operate, nil
	case "", "admin":
		return admin, nil
	}
	return 0, errors.New("give read, operate or admin") // s may be a token in the wrong place
}

// roles are the calls that need another role than read for GET and admin for
// everything else.
var roles = map[string]role{
	"GET /healthz": nobody,
	"GET /readyz":  nobody,

	"POST /explain": operate,

	"DELETE /sessions/{id}": operate,

	"POST /pools/{pool}/backends":          operate,
	"PATCH /pools/{pool}/backends/{addr}":  operate,
	"DELETE /pools/{pool}/backends/{addr}": operate,

	"POST /route-hint":             operate,
	"DELETE /route-hints/{src_ip}": operate,

	"POST /admin/drain":   operate,
	"POST /admin/undrain": operate,
}

// roleOf is the least role for a call.
func roleOf(pattern, method string) role {
	if need, ok := roles[method+" "+pattern]; ok {
		return need
	}
	if method == http.MethodGet {
		return reader
	}
	return admin
}
