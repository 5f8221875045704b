#!/bin/sh
# Installs the peers that the benchmark compares with (Debian, Ubuntu) and
# checks what it needs. Run as root from anywhere; running it again is harmless.
# Plain caddy-l4 and the product are built by the harness itself.
set -eu
cd "$(dirname "$0")/.."

export DEBIAN_FRONTEND=noninteractive
if ! command -v nginx >/dev/null || ! command -v haproxy >/dev/null ||
	! [ -e /usr/lib/nginx/modules/ngx_stream_module.so ]; then
	# The harness starts its own; the packages' services would only be in the way.
	policy=/usr/sbin/policy-rc.d
	if ! [ -e "$policy" ]; then
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod +x "$policy"
		trap 'rm -f "$policy"' EXIT
	fi
	apt-get update -q
	apt-get install -y -q --no-install-recommends nginx libnginx-mod-stream haproxy
fi
nginx -v
haproxy -v | head -n 1

files=$(ulimit -Hn)
if [ "$files" != unlimited ] && [ "$files" -lt 20000 ]; then
	echo "only $files files a process: the idle scenarios need 20,000" >&2
	exit 1
fi
if [ "$(nproc)" -lt 2 ]; then
	echo "one CPU: the proxy needs one of its own" >&2
	exit 1
fi
go build -o /dev/null ./bench/cmd/caddyl4
go build -o /dev/null ./bench/cmd/load
echo "ready: go run ./bench/cmd/bench -scenario all -rounds 5"
