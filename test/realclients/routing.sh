# Clients whose route depends on what they say first, for run, which has set
# up the namespace, dir and check. One port, 15443, has them all: TLS by server
# name, HTTP/3 by server name, OpenVPN over TCP and UDP, WireGuard; 15565 is
# Minecraft's. Who does not say what they should gets a backend that nobody
# wants.

printf '127.0.0.1 localhost a.test b.test survival.test creative.test\n' >"$dir/hosts"
mount --bind "$dir/hosts" /etc/hosts # in this mount namespace alone
mkdir -p /run/wireguard
mount -t tmpfs none /run/wireguard # where wireguard-go has its sockets

# The servers.
for name in a b; do
	mkdir "$dir/$name"
	echo "this is $name" >"$dir/$name/who"
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj "/CN=$name.test" \
		-addext "subjectAltName=DNS:$name.test" -keyout "$dir/$name/key" -out "$dir/$name/cert" 2>/dev/null
done
(cd "$dir/a" && exec openssl s_server -quiet -accept 127.0.0.1:27001 -cert cert -key key -WWW >/dev/null 2>&1) &
(cd "$dir/b" && exec openssl s_server -quiet -accept 127.0.0.1:27002 -cert cert -key key -WWW >/dev/null 2>&1) &
bin/realclients/http3 serve 127.0.0.1:28001 "a over quic-go" &
export NODE_PATH=$PWD/bin/realclients/node_modules
node test/realclients/minecraft/server.js 25565 "this is survival" >/dev/null &
node test/realclients/minecraft/server.js 25566 "this is creative" >/dev/null &

# Two OpenVPN peers that know each other by their certificates' fingerprints;
# no device, for it is the handshake that finds its way.
print_of() { openssl x509 -in "$dir/$1/cert" -noout -fingerprint -sha256 | cut -d= -f2; }
openvpn_peer() { # whose certificate, whose to expect, then options
	local own=$1 peer=$2
	shift 2
	openvpn --dev null --cert "$dir/$own/cert" --key "$dir/$own/key" --peer-fingerprint "$(print_of "$peer")" --verb 3 "$@"
}
openvpn_peer a b --tls-server --dh none --proto udp4 --local 127.0.0.1 --lport 26001 >"$dir/openvpn-udp.log" 2>&1 &
openvpn_peer a b --tls-server --dh none --proto tcp4-server --local 127.0.0.1 --lport 26001 >"$dir/openvpn-tcp.log" 2>&1 &

# Two WireGuard peers. The client's device goes to a namespace of its own, while
# its socket stays in this one: what is sent through the tunnel has no other way.
unshare --net sleep 600 &
far=$!
export WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD=1 WG_PROCESS_FOREGROUND=1
for dev in server client; do
	(umask 077 && wg genkey >"$dir/wg-$dev.key")
	wg pubkey <"$dir/wg-$dev.key" >"$dir/wg-$dev.pub"
	wireguard-go "whw$dev" >"$dir/wg-$dev.log" 2>&1 &
done
for dev in server client; do
	for _ in {1..100}; do
		! wg show "whw$dev" >/dev/null 2>&1 || break
		sleep 0.05
	done
done
wg set whwserver private-key "$dir/wg-server.key" listen-port 29001 peer "$(cat "$dir/wg-client.pub")" allowed-ips 10.9.0.2/32
wg set whwclient private-key "$dir/wg-client.key" peer "$(cat "$dir/wg-server.pub")" allowed-ips 10.9.0.1/32 endpoint 127.0.0.1:15443
ip addr add 10.9.0.1/24 dev whwserver
ip link set whwserver up
ip link set whwclient netns "$far"
in_far() { nsenter --target "$far" --net "$@"; }
in_far ip addr add 10.9.0.2/24 dev whwclient
in_far ip link set whwclient up

# wayhouse, which is the HTTP/3 server of b.test as well, by Caddy's http app.
cat >"$dir/routing.json" <<END
{"admin": {"listen": "localhost:2020", "config": {"persist": false}},
 "apps": {
  "pki": {"certificate_authorities": {"local": {"install_trust": false}}},
  "tls": {"automation": {"policies": [{"subjects": ["b.test"], "issuers": [{"module": "internal"}]}]}},
  "http": {"servers": {"b": {
   "listen": ["127.0.0.1:28002"], "automatic_https": {"disable_redirects": true}, "tls_connection_policies": [{}],
   "routes": [{"match": [{"host": ["b.test"]}], "handle": [{"handler": "static_response", "body": "b over Caddy"}]}]}}},
  "wayhouse": {
   "shutdown_grace": "1s",
   "pools": {
    "tls-a": {"targets": ["127.0.0.1:27001"], "health": {"check": "none"}},
    "tls-b": {"targets": ["127.0.0.1:27002"], "health": {"check": "none"}},
    "quic-a": {"targets": ["127.0.0.1:28001"], "health": {"check": "none"}},
    "quic-b": {"targets": ["127.0.0.1:28002"], "health": {"check": "none"}},
    "openvpn": {"targets": ["127.0.0.1:26001"], "health": {"check": "none"}},
    "wireguard": {"targets": ["127.0.0.1:29001"], "health": {"check": "none"}},
    "survival": {"targets": ["127.0.0.1:25565"], "health": {"check": "none"}},
    "creative": {"targets": ["127.0.0.1:25566"], "health": {"check": "none"}},
    "nobody": {"targets": ["127.0.0.1:9"], "health": {"check": "none"}}},
   "listeners": {
    "tcp": {"bind": ["tcp/127.0.0.1:15443"], "peek": {"timeout": "5s"}, "routes": [
     {"match": [{"sni": {"host": ["a.test"]}}], "handle": [{"handler": "pool", "pool": "tls-a"}]},
     {"match": [{"sni": {"host": ["b.test"]}}], "handle": [{"handler": "pool", "pool": "tls-b"}]},
     {"match": [{"sniffer": {"name": "openvpn"}}], "handle": [{"handler": "pool", "pool": "openvpn"}]},
     {"handle": [{"handler": "pool", "pool": "nobody"}]}]},
    "udp": {"bind": ["udp/127.0.0.1:15443"], "peek": {"timeout": "5s"}, "routes": [
     {"match": [{"sni": {"host": ["a.test"]}}], "handle": [{"handler": "pool", "pool": "quic-a"}]},
     {"match": [{"sni": {"host": ["b.test"]}}], "handle": [{"handler": "pool", "pool": "quic-b"}]},
     {"match": [{"sniffer": {"name": "wireguard"}}], "handle": [{"handler": "pool", "pool": "wireguard"}]},
     {"match": [{"sniffer": {"name": "openvpn"}}], "handle": [{"handler": "pool", "pool": "openvpn"}]},
     {"handle": [{"handler": "pool", "pool": "nobody"}]}]},
    "minecraft": {"bind": ["tcp/127.0.0.1:15565"], "peek": {"timeout": "5s"}, "routes": [
     {"match": [{"sniffer": {"name": "minecraft", "host": ["survival.test"]}}], "handle": [{"handler": "pool", "pool": "survival"}]},
     {"match": [{"sniffer": {"name": "minecraft", "host": ["creative.test"]}}], "handle": [{"handler": "pool", "pool": "creative"}]},
     {"handle": [{"handler": "pool", "pool": "nobody"}]}]}}}}}
END
HOME=$dir XDG_DATA_HOME=$dir/data2 XDG_CONFIG_HOME=$dir/conf2 bin/wayhouse run --config "$dir/routing.json" 2>"$dir/routing.log" &
curl -s --retry 50 --retry-all-errors --retry-delay 0 --retry-max-time 30 -o /dev/null -f localhost:2020/readyz

curl_to() { curl -sS --max-time 20 --cacert "$dir/$1/cert" --resolve "$1.test:15443:127.0.0.1" "https://$1.test:15443/who"; }
s_client() {
	openssl s_client -connect 127.0.0.1:15443 -servername "$1.test" -CAfile "$dir/$1/cert" -verify_return_error </dev/null 2>&1 | grep -c 'Verification: OK'
}
h3_to() { bin/realclients/http3 get 127.0.0.1:15443 "$1.test"; }
ping_of() { node test/realclients/minecraft/ping.js "$1.test" 15565; }
openvpn_over() { # protocol
	openvpn_peer b a --tls-client --nobind --proto "$1" --remote 127.0.0.1 15443 >"$dir/openvpn-client.log" 2>&1 &
	local pid=$! done=1
	for _ in {1..200}; do
		if grep -q 'Initialization Sequence Completed' "$dir/openvpn-client.log"; then
			done=0
			break
		fi
		sleep 0.1
	done
	kill "$pid"
	[ $done = 0 ] || tail -n 20 "$dir/openvpn-client.log"
	return $done
}
through_tunnel() { in_far ping -c 3 -i 0.3 -W 10 10.9.0.1; }
in_pool() { [ "$(curl -s "localhost:2020/sessions?pool=$1" | grep -o '"id"' | wc -l)" = "$2" ]; }
export far
export -f curl_to s_client h3_to ping_of openvpn_over openvpn_peer print_of through_tunnel in_far in_pool

check "curl to a.test, TLS passed through by its name" bash -c 'says "this is a" curl_to a'
check "curl to b.test" bash -c 'says "this is b" curl_to b'
check "openssl s_client to a.test" bash -c 'says 1 s_client a'
check "openssl s_client to b.test" bash -c 'says 1 s_client b'
check "HTTP/3 to a.test, a server of quic-go" bash -c 'says "a over quic-go" h3_to a'
check "HTTP/3 to b.test, which is Caddy" bash -c 'says "b over Caddy" h3_to b'
check "the status of a Minecraft server by its name" bash -c 'says "this is survival" ping_of survival'
check "that of another on the same port" bash -c 'says "this is creative" ping_of creative'
check "OpenVPN over UDP" bash -c 'openvpn_over udp4'
check "OpenVPN over TCP" bash -c 'openvpn_over tcp4-client'
check "ping through a WireGuard tunnel" bash -c 'through_tunnel'
check "which is a session of its pool" bash -c 'in_pool wireguard 1'
check "no client ended at the backend that nobody wants" bash -c '! curl -s localhost:2020/pools/nobody?format=text | grep -v " total=0$"'
