#!/bin/sh
# Assembles the guests beside their sources. Needs wat2wasm (Debian package wabt).
# wat2wasm writes no custom sections, so each line ";; section NAME HEX" at the
# top of a guest is appended as one: id 0, size, length of the name, name, content.
set -eu
cd "$(dirname "$0")"
byte() { printf "\\$(printf '%03o' "$1")"; }
for f in guests/*.wat hostile/*.wat; do
	o=${f%.wat}.wasm
	wat2wasm "$f" -o "$o"
	sed -n 's/^;; section \([^ ]*\) \([0-9a-f]*\)$/\1 \2/p' "$f" | while read -r name hex; do
		{
			byte 0
			byte $((1 + ${#name} + ${#hex} / 2))
			byte ${#name}
			printf '%s' "$name"
			while [ -n "$hex" ]; do
				rest=${hex#??}
				byte $((0x${hex%"$rest"}))
				hex=$rest
			done
		} >>"$o"
	done
done
