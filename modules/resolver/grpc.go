package resolver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	resolverv1 "github.com/wayhouse-proxy/wayhouse/modules/resolver/proto"
)

// With protoc-gen-go v1.36 and protoc-gen-go-grpc v1.6:
//go:generate protoc --proto_path=proto --go_out=proto --go_opt=paths=source_relative --go-grpc_out=proto --go-grpc_opt=paths=source_relative resolver.proto

func init() { caddy.RegisterModule(new(GRPC)) }

// GRPC asks by the method Resolve of the gRPC service
// wayhouse.resolver.v1.Resolver.
type GRPC struct {
	Settings
	Remote

	channel *channel
}

// CaddyModule returns the Caddy module information.
func (*GRPC) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.resolvers.grpc",
		New: func() caddy.Module { return new(GRPC) },
	}
}

// channel is a connection to a service. It outlives configs, so that a reload
// costs no flow a handshake.
type channel struct{ *grpc.ClientConn }

var channels = caddy.NewUsagePool()

// Destruct implements caddy.Destructor.
func (c *channel) Destruct() error { return c.Close() }

func (g *GRPC) channelKey() transportKey { return transportKey{g.url.Scheme, g.url.Host, g.rootSum} }

// Provision sets the defaults and takes the channel, which connects when it is
// first used.
func (g *GRPC) Provision(ctx caddy.Context) error {
	if err := g.Settings.Provision(ctx); err != nil {
		return err
	}
	if err := g.Remote.provision(); err != nil {
		return err
	}
	if p := g.url.Path; p != "" && p != "/" || g.url.RawQuery != "" {
		return errors.New("endpoint: gRPC has no path: give scheme, host and port alone")
	}
	for name := range g.headers {
		if lower := strings.ToLower(name); strings.HasPrefix(lower, "grpc-") || strings.HasSuffix(lower, "-bin") {
			return errors.New("headers: gRPC keeps grpc-… and …-bin for itself")
		}
	}
	if err := g.Settings.Validate(); err != nil {
		return err
	}
	v, _, err := channels.LoadOrNew(g.channelKey(), func() (caddy.Destructor, error) {
		cc, err := g.connect()
		return &channel{cc}, err
	})
	if err != nil {
		return err
	}
	g.channel = v.(*channel)
	return nil
}

func (g *GRPC) connect() (*grpc.ClientConn, error) {
	creds, port := insecure.NewCredentials(), "80"
	if g.url.Scheme == "https" {
		creds, port = credentials.NewTLS(g.tls()), "443"
	}
	if p := g.url.Port(); p != "" {
		port = p
	}
	retry := backoff.DefaultConfig
	retry.MaxDelay = 2 * time.Second // a service that is back should be asked soon
	return grpc.NewClient("dns:///"+net.JoinHostPort(g.url.Hostname(), port),
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return fetch.Dial(ctx, "tcp", addr) }),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: fetch.DeadPeer}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxBody)),
		grpc.WithMaxHeaderListSize(maxBody),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithUserAgent("wayhouse"),
		grpc.WithIdleTimeout(0),
	)
}

// Close gives the channel back.
func (g *GRPC) Close() error {
	if g.channel == nil {
		return nil
	}
	_, err := channels.Delete(g.channelKey())
	return err
}

// Resolve implements Resolver.
func (g *GRPC) Resolve(ctx context.Context, r *Request) (Answer, error) {
	if len(g.headers) > 0 {
		ctx = metadata.NewOutgoingContext(ctx, metadata.New(g.headers))
	}
	if r.TraceParent != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", r.TraceParent)
	}
	resp, err := resolverv1.NewResolverClient(g.channel).Resolve(ctx, &resolverv1.ResolveRequest{
		Listener: r.Listener, Src: r.Client.String(), Dst: r.Dst(),
		Sni: utf8(r.SNI), FirstBytes: r.FirstBytes, RoutingKey: utf8(r.RoutingKey),
	})
	if status.Code(err) == codes.DeadlineExceeded { // as the service may tell before our own time is over
		return Answer{}, fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	if err != nil {
		return Answer{}, err
	}
	return makeAnswer(resp.GetPool(), resp.GetTarget(), resp.TtlSec)
}

// utf8 makes what a client has sent a string that a message may have.
func utf8(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// Interface guards
var (
	_ caddy.Provisioner = (*GRPC)(nil)
	_ Resolver          = (*GRPC)(nil)
	_ io.Closer         = (*GRPC)(nil)
)
