SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
FUZZTIME ?= 20s
# Optional parts of xcaddy.json, separated by commas; empty takes all of them.
WITH ?=
# A release: its version, which is the last tag or one that Go would make up, its
# commit, and the time that its files have.
git_version := git describe --tags --match 'v[0-9]*' 2>/dev/null || TZ=UTC git log -1 --abbrev=12 --date=format-local:%Y%m%d%H%M%S --format=v0.0.0-%cd-%h 2>/dev/null || echo v0.0.0
VERSION ?= $(shell $(git_version))
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null)
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
ARCHS ?= amd64 arm64
# Caddy's own releases leave these databases of its certificate authority out too.
TAGS := nobadger,nomysql,nopgx
NFPM := github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.48.0
CYCLONEDX := github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0
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
.PHONY: dist deb sbom vuln licences minimal packages reproducible FORCE

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
	cd internal/ci/manifests && go test ./...

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
	cd internal/ci/manifests && go vet ./...

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

# The binary of a release. Nothing of the machine that builds it is in it, so that
# anybody who builds the same commit with the same Go gets the same bytes.
dist/linux_%/wayhouse: FORCE
	CGO_ENABLED=0 GOOS=linux GOARCH=$* GOFLAGS= go build -trimpath -buildvcs=false -tags $(TAGS) \
		-ldflags '-s -w -X $(version_package).release=$(VERSION) -X $(version_package).commit=$(COMMIT)' -o $@ ./cmd/wayhouse

version_package := github.com/wayhouse-proxy/wayhouse/internal/version

dist: $(ARCHS:%=dist/linux_%/wayhouse) licences ## build the tarballs of a release, and their checksums
	deploy/tarballs '$(VERSION)' $(ARCHS)

deb: $(ARCHS:%=dist/linux_%/wayhouse) ## build Debian packages
	NFPM='$(NFPM)' deploy/deb/build '$(VERSION)' $(ARCHS)

sbom: $(ARCHS:%=dist/linux_%/wayhouse) ## write what a release is made of, as CycloneDX, to dist/
	for arch in $(ARCHS); do \
		go run $(CYCLONEDX) bin -json -licenses -std -noserial -version '$(VERSION)' \
			-output dist/wayhouse_$(VERSION:v%=%)_linux_$$arch.cdx.json dist/linux_$$arch/wayhouse; \
	done

vuln: ## look for known vulnerabilities in what is called, where their database is reached
	@out=$$(go run $(GOVULNCHECK) ./... 2>&1) && status=0 || status=$$?; echo "$$out"; \
	if [ $$status != 0 ] && grep -qE 'vuln\.go\.dev.*(dial|lookup|timeout|refused|proxyconnect|Forbidden|403)|fetching vulnerabilities' <<<"$$out"; then \
		echo "skipped: the database of vulnerabilities cannot be reached"; exit 0; fi; exit $$status

licences: ## check the licences of what a release is made of, and list them in dist/
	go run ./internal/ci/licences -tags $(TAGS) -o dist/THIRD-PARTY ./cmd/wayhouse

minimal: ## build bin/wayhouse-minimal, without the parts that a small proxy does not need
	CGO_ENABLED=0 go build -trimpath -tags $(TAGS) -ldflags "-s -w" -o bin/wayhouse-minimal ./cmd/wayhouse-minimal

packages: ## build, install, upgrade and remove packages, and build twice (root, Debian)
	WAYHOUSE_PACKAGES=1 go test -count=1 -timeout 60m -run TestPackages -v ./test/packages

print-%:
	@echo '$($*)'

reproducible: ## build a release in two folders with two caches and compare
	deploy/reproducible

clean: ## remove what was built
	rm -rf bin dist
