# Servers that are told by a PROXY header who their clients are, for run: nginx
# and HAProxy from Debian. Each logs client and destination as it was told, which
# has to be what curl says of its connection.

mkdir "$dir/nginx"
cat >"$dir/nginx/conf" <<END
daemon off; master_process off; pid $dir/nginx/pid; error_log stderr;
events {}
http {
	log_format told '\$proxy_protocol_addr \$proxy_protocol_port \$proxy_protocol_server_addr \$proxy_protocol_server_port';
	access_log $dir/told-nginx told;
	client_body_temp_path $dir/nginx/a; proxy_temp_path $dir/nginx/b; fastcgi_temp_path $dir/nginx/c; uwsgi_temp_path $dir/nginx/d; scgi_temp_path $dir/nginx/e;
	server { listen 127.0.0.1:27101 proxy_protocol; return 200 hello; }
}
END
nginx -p "$dir/nginx" -c "$dir/nginx/conf" 2>"$dir/nginx/log" &
cat >"$dir/haproxy" <<END
global
	log stdout format raw local0
defaults
	mode http
	log global
	log-format "%ci %cp %fi %fp"
	timeout connect 10s
	timeout client 10s
	timeout server 10s
frontend f
	bind 127.0.0.1:27102 accept-proxy
	http-request return status 200 content-type text/plain string hello
END
haproxy -db -f "$dir/haproxy" >"$dir/told-haproxy" 2>"$dir/haproxy.log" &

pool() { printf '{"targets": ["127.0.0.1:%s"], "health": {"check": "none"}, "proxy_protocol": "%s"}' "$1" "$2"; }
listener() { printf '{"bind": ["tcp/:%s"], "routes": [{"handle": [{"handler": "pool", "pool": "%s"}]}]}' "$1" "$2"; }
cat >"$dir/told.json" <<END
{"admin": {"listen": "localhost:2021", "config": {"persist": false}},
 "apps": {"wayhouse": {
  "shutdown_grace": "1s",
  "pools": {"nginx-v1": $(pool 27101 v1), "nginx-v2": $(pool 27101 v2), "haproxy-v1": $(pool 27102 v1), "haproxy-v2": $(pool 27102 v2)},
  "listeners": {
   "a": $(listener 17101 nginx-v1), "b": $(listener 17102 nginx-v2), "c": $(listener 17103 haproxy-v1), "d": $(listener 17104 haproxy-v2)}}}}
END
HOME=$dir XDG_DATA_HOME=$dir/data3 XDG_CONFIG_HOME=$dir/conf3 bin/wayhouse run --config "$dir/told.json" 2>"$dir/told.log" &
curl -s --retry 50 --retry-all-errors --retry-delay 0 --retry-max-time 30 -o /dev/null -f localhost:2021/readyz

told() { # whose log, then where to
	local who
	who=$(curl -sS -f --retry 20 --retry-all-errors --retry-delay 0 -o /dev/null -w '%{local_ip} %{local_port} %{remote_ip} %{remote_port}' "http://$2/")
	for _ in {1..100}; do
		! grep -qxF "$who" "$dir/told-$1" || return 0
		sleep 0.1
	done
	echo "the client is $who and not in the log:"
	tail -n 5 "$dir/told-$1"
	return 1
}
export -f told

for to in 127.0.0.1 '[::1]'; do
	check "nginx logs the client at $to, by version 1" bash -c "told nginx '$to:17101'"
	check "nginx logs the client at $to, by version 2" bash -c "told nginx '$to:17102'"
	check "HAProxy logs the client at $to, by version 1" bash -c "told haproxy '$to:17103'"
	check "HAProxy logs the client at $to, by version 2" bash -c "told haproxy '$to:17104'"
done
