SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
FUZZTIME ?= 20s
# Optional parts of xcaddy.json, separated by commas; empty takes all of them.
WITH ?=
# Packages that "make test" runs, and flags for "go test".
PACKAGES ?= ./...
TESTFLAGS ?=

# What to try while "make run" runs, in another terminal.
define TRY
A TCP and a UDP listener on port 7777, each with two backends that send back
what they get. In another terminal:

  nc 127.0.0.1 7777                                  # type something
  nc -u 127.0.0.1 7777
  curl 'localhost:2019/pools?format=text'            # backends and their health
  curl 'localhost:2019/sessions?format=text'         # who is connected
  curl -X DELETE localhost:2019/sessions/ID          # and no longer
  curl -s localhost:2019/metrics | grep ^wayhouse_
  bin/wayhouse reload --config Caddyfile.example --adapter caddyfile

Edit Caddyfile.example before the reload: who plays stays connected. End with Ctrl-C.

endef
export TRY

.PHONY: help build run test soak realclients lint fuzz fuzz-short bench xcaddy clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

build: ## build bin/wayhouse
	go build -o bin/wayhouse ./cmd/wayhouse

run: build ## run Caddyfile.example: two sample game servers behind one port
	@echo "$$TRY"
	@bin/wayhouse run --config Caddyfile.example --adapter caddyfile

# The race detector allocates, so that tests of allocations run without it.
test: ## run every test with the race detector
	go test -json -race -timeout 20m $(TESTFLAGS) $(PACKAGES) | go run ./internal/ci/skips -allow .ci/skips
	go test -run Allocat $$(git grep -lE '^func Test\w*Allocat' -- '*_test.go' | xargs -n1 dirname | sort -u | sed 's|^|./|')
	cd examples/third-party && go test -race ./...

soak: ## run the long forms of the tests of the whole product
	WAYHOUSE_SOAK=1 go test -count=1 -timeout 90m ./test/...

realclients: ## run nc, curl, ssh, Minecraft, WireGuard… through a wayhouse (root, Debian)
	test/realclients/run

lint: ## gofmt, go vet, staticcheck
	@unformatted=$$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l); \
	if [ -n "$$unformatted" ]; then echo "not formatted by gofmt:"; echo "$$unformatted"; exit 1; fi
	go vet ./...
	go run $(STATICCHECK) ./...
	cd examples/third-party && go vet ./... && go run $(STATICCHECK) ./...

# Making a find smaller is bounded: with pools in the code the coverage of an input
# is never twice the same, and a target would do nothing else.
fuzz: ## run every fuzz target for FUZZTIME (20s)
	@for file in $$(git grep -lE '^func Fuzz' -- '*_test.go'); do \
		for target in $$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/p' $$file); do \
			echo "$$(dirname $$file) $$target"; \
			go test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x ./$$(dirname $$file); \
		done; \
	done

fuzz-short: ## run every fuzz target for a minute
	@$(MAKE) --no-print-directory fuzz FUZZTIME=60s

bench: ## measure beside nginx, HAProxy and caddy-l4 (see bench/README.md)
	go run ./bench/cmd/bench

xcaddy: ## build bin/wayhouse-custom with the parts of xcaddy.json and try it
	go run ./internal/ci/xcaddy -with '$(WITH)'

clean: ## remove what was built
	rm -rf bin dist
