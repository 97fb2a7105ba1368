PORT ?= 6379
PREFIX ?= /usr/local
MODULES = /usr/lib/redis/modules

TARGET := $(or $(CARGO_TARGET_DIR),target)
MODULE := $(TARGET)/release/liblockkeeper.so
COMMAND := $(TARGET)/release/lockkeeper
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)

# $(call need,CHECK,PACKAGE,THEN): installs Debian's PACKAGE, and does THEN, unless CHECK succeeds.
define need
@{ $(1); } >/dev/null 2>&1 || { \
	command -v apt-get >/dev/null || \
		{ echo 'Install what Debian calls $(2), then try again.' >&2; exit 1; }; \
	$(SUDO) apt-get update && $(SUDO) apt-get install -y --no-install-recommends $(2)$(and $(3), && { $(3); }); }
endef

.PHONY: help build run install test lint clean build-needs server-needs test-needs python-needs

help: ## show this
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

build: build-needs ## build the module and the command into target/release
	cargo build --release

run: build server-needs ## start a redis-server with the module on PORT (6379), data in a temporary folder
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT INT TERM && \
	printf '%s\n' 'Try in another terminal, and end the server with Ctrl-C:' \
		'  redis-cli -p $(PORT) LOCK.ACQUIRE door alice 30000' \
		'  redis-cli -p $(PORT) LOCK.INFO door' \
		'  redis-cli -p $(PORT) LOCK.RELEASE door alice' && \
	redis-server --port $(PORT) --dir "$$dir" --save '' --loadmodule '$(abspath $(MODULE))'

install: | $(MODULE) $(COMMAND) ## install the module to /usr/lib/redis/modules, command and man pages below PREFIX
	install -D -m 0755 $(MODULE) $(DESTDIR)$(MODULES)/liblockkeeper.so
	install -D -m 0755 $(COMMAND) $(DESTDIR)$(PREFIX)/bin/lockkeeper
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	$(COMMAND) man $(DESTDIR)$(PREFIX)/share/man/man1

# So that `sudo make install` after `make build` needs no cargo.
$(MODULE) $(COMMAND):
	$(MAKE) build

test: build test-needs .venv/ready conformance-needs ## run all tests, on the redis-server in SERVER if it is set
	@rm -f $(TARGET)/left-out.txt
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') cargo test --workspace --no-fail-fast; \
		status=$$?; $(MAKE) test-python-quick || status=1; $(MAKE) test-go-quick || status=1; \
		tests/print-left-out; exit $$status

.PHONY: test-conformance conformance-needs

test-conformance: build test-needs conformance-needs ## run the scenarios of clients/CONTRACT.md for the helpers of all languages
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') cargo test -p lockkeeper-conformance --no-fail-fast

# The client libraries through which the Python helper is tried there, and the agent of the Go helper.
conformance-needs: $(TARGET)/conformance/redis/ready $(TARGET)/conformance/valkey/ready $(TARGET)/conformance/go/agent

$(TARGET)/conformance/%/ready: clients/conformance/requirements/%.txt | test-needs
	python3 -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

.PHONY: test-python test-python-quick test-python-nightly

# An environment for each Python and client library to be tested with, `PYTHON:LIBRARY==VERSION`. A Python that is not
# here is left out; python3 always is.
PYTHON_NEWEST := $(shell cat clients/conformance/requirements/redis.txt clients/conformance/requirements/valkey.txt)
PYTHON_QUICK := $(PYTHON_NEWEST:%=python3:%)
PYTHON_TESTS ?= $(PYTHON_QUICK) python3:redis==5.0.8 python3.9:redis==5.0.8 python3.10:redis==6.4.0 \
	python3.12:redis==7.4.1 $(PYTHON_NEWEST:%=python3.13:%)
VALKEY := $(TARGET)/servers/valkey-8.1/redis-server

# $(call test-python,VARIABLES,ENVIRONMENTS)
test-python = $(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') LOCKKEEPER_MODULE='$(abspath $(MODULE))' \
	$(1) clients/python/run-tests '$(abspath $(TARGET)/python)' $(2)

test-python: python-needs $(if $(SERVER),,$(VALKEY)) ## test the Python helper on PYTHON_TESTS='python3.9:redis==5.0.8 …', valkey-py on Valkey
	$(call test-python,$(if $(SERVER),,VALKEY='$(abspath $(VALKEY))'),$(PYTHON_TESTS))

test-python-quick: python-needs ## test it on the newest redis-py and valkey-py; a part of `make test`
	$(call test-python,QUICK=1,$(PYTHON_QUICK))

test-python-nightly: python-needs test-needs $(TARGET)/conformance/gevent/ready ## test it under gevent and uvicorn, all scenarios too
	$(call test-python,NIGHTLY=1,$(firstword $(PYTHON_QUICK)))
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') cargo test -p lockkeeper-conformance --test suite -- python-gevent

python-needs: $(MODULE) $(if $(SERVER),,server-needs)
	$(call need,python3 -c 'import ensurepip',python3-venv)
	$(call need,command -v openssl,openssl)

$(VALKEY):
	tests/servers/fetch valkey-8.1

.PHONY: test-go test-go-quick $(TARGET)/conformance/go/agent

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.6.1
GO_VERSION := $(shell sed -n 's/^go //p' clients/go/go.mod)

# $(call where-go,THEN): does THEN where Go is here. Where it is not the scenarios of its helper are left out, and say so;
# but not where every change is tested, which sets CI.
define where-go
	@if found=$$(cd clients/go && go env GOVERSION 2>/dev/null) && \
		printf 'go%s\n' $(GO_VERSION) "$${found#go}" | sort --check=quiet --version-sort; then $(1); \
	elif [ "$$CI" ]; then echo 'Install Go $(GO_VERSION) or later: https://go.dev/dl' >&2; exit 1; fi
endef

# Built every time: Go knows what has changed.
$(TARGET)/conformance/go/agent:
	@rm -f $@
	$(call where-go,cd clients/go && go build -o '$(abspath $@)' ./cmd/agent)

test-go-quick: $(MODULE) $(if $(SERVER),,server-needs) ## test the Go helper without what takes long, where Go is here; a part of `make test`
	$(call where-go,$(MAKE) test-go QUICK=1)

test-go: $(MODULE) $(if $(SERVER),,server-needs) ## test the Go helper with the race detector, its format and lints
	$(call need,command -v go,golang-go)
	$(call need,command -v openssl,openssl)
	for module in clients/go clients/go/adapters tests/porcupine; do \
		(cd $$module && test -z "$$(gofmt -l .)" && go vet ./... && go run $(STATICCHECK) ./... && \
		$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') LOCKKEEPER_MODULE='$(abspath $(MODULE))' \
		go test -race $(if $(QUICK),-short) ./...) || exit; \
	done

.PHONY: chaos chaos-planted

HISTORY ?= $(TARGET)/chaos

# $(call chaos,VARIABLES,TESTS): runs tests of tests/chaos, and lets a second judge look at what they recorded, where Go is.
define chaos
	@mkdir -p '$(HISTORY)' && rm -f '$(HISTORY)'/*.jsonl '$(HISTORY)'/*.html '$(HISTORY)/failed'
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') CHAOS_HISTORY='$(abspath $(HISTORY))' $(1) \
		cargo test --workspace --test chaos -- $(2) --nocapture || touch '$(HISTORY)/failed'
	$(call where-go,cd tests/porcupine && go run . '$(abspath $(HISTORY))')
	@! test -e '$(HISTORY)/failed'
endef

chaos: build conformance-needs $(if $(SERVER),,server-needs) ## check what owners observe while servers fail; SEED=1, MINUTES=0 (one turn of 20 rounds), ONLY=cluster, HISTORY=folder
	$(call chaos,CHAOS_SEED='$(or $(SEED),1)' CHAOS_MINUTES='$(or $(MINUTES),0)' CHAOS_ONLY='$(ONLY)',--ignored --exact rounds)

chaos-planted: build conformance-needs $(if $(SERVER),,server-needs) ## see both judges of chaos find the faults that are planted, and no others
	$(call chaos)

.PHONY: bench bench-check

# Those of these questions that a server with DELIFEQ can tell more about are asked again there, if
# `tests/servers/fetch valkey-9.1` has fetched one.
NATIVE := target/servers/valkey-9.1/redis-server

bench: build $(if $(SERVER),,server-needs) $(TARGET)/bench/python/ready $(addprefix $(TARGET)/bench/,$(sort $(patsubst redislock,go_locks,$(PEERS:redsync=go_locks)))) ## measure against what people use (25 min); QUICK=1, ONLY='uncontended renew', PEERS='redlock redis-semaphore redislock redsync'
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') cargo bench -p lockkeeper-benches --bench suite -- $(ONLY)
	$(if $(SERVER)$(ONLY),,$(if $(wildcard $(NATIVE)), \
		LOCKKEEPER_TEST_SERVER='$(abspath $(NATIVE))' cargo bench -p lockkeeper-benches --bench suite -- uncontended renew))

bench-check: build $(if $(SERVER),,server-needs) ## count instructions against benches/instructions.json; UPDATE=1 writes it
	$(call need,command -v valgrind,valgrind)
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') cargo bench -p lockkeeper-benches --bench instructions

$(TARGET)/bench/python/ready: benches/peers/requirements.txt $(wildcard clients/python/src/redis_lockkeeper/*.py)
	$(call need,python3 -c 'import ensurepip',python3-venv)
	python3 -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	$(@D)/bin/pip install --quiet --force-reinstall --no-deps ./clients/python
	touch $@

$(TARGET)/bench/redlock:
	$(call need,command -v npm,npm)
	npm install --silent --prefix $@ redlock@5.0.0-beta.2 ioredis@5

$(TARGET)/bench/redis-semaphore:
	$(call need,command -v npm,npm)
	npm install --silent --prefix $@ redis-semaphore@5.8.0 ioredis@5

$(TARGET)/bench/go_locks: $(wildcard benches/peers/go/*) $(wildcard clients/go/*.go)
	$(call need,command -v go,golang-go)
	cd $(<D) && go build -buildvcs=false -o '$(abspath $@)' .

.PHONY: test-matrix test-memory test-compatibility model fuzz audit licences

test-matrix: build test-needs .venv/ready conformance-needs ## run all tests on every server there is (fetches them), and print a table
	tests/servers/matrix

test-memory: build test-needs ## run the tests of commands and waiting on a server under valgrind
	$(call need,command -v valgrind,valgrind)
	SERVER='$(if $(SERVER),$(abspath $(SERVER)))' tests/servers/memory

test-compatibility: build test-needs ## run the helper on the module of the release before, and the other way round
	tests/servers/compatibility

COMMANDS ?= 1000000
model: build test-needs ## compare server and model after each of COMMANDS (1000000) random commands; SEED=… repeats
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') LOCKKEEPER_MODEL_SEED=$(or $(SEED),$$(date +%s%N)) \
		LOCKKEEPER_MODEL_COMMANDS=$(COMMANDS) cargo test --test model -- --nocapture

# Stable Rust will do: the core has no unsafe code, so nothing but its own assertions is needed.
FUZZ = RUSTC_BOOTSTRAP=1 PATH="$(abspath $(TARGET))/tools/bin:$$PATH" cargo fuzz
fuzz: build-needs ## throw bytes at the core's arguments and values for MINUTES (10) each
	$(call need,command -v g++,g++)
	@$(FUZZ) --version >/dev/null 2>&1 || \
		cargo install --quiet --locked --root $(TARGET)/tools --version 0.13.1 cargo-fuzz
	for target in arguments values lists; do \
		mkdir -p $(TARGET)/fuzz/corpus/$$target && \
		$(FUZZ) run --features run --fuzz-dir tests/fuzz --target-dir $(TARGET)/fuzz --sanitizer none $$target \
			$(abspath $(TARGET))/fuzz/corpus/$$target -- -max_len=1200 \
			-max_total_time=$$(( $(or $(MINUTES),10) * 60 )) -print_final_stats=1 || exit; \
	done

# The list of known holes comes from a repository of its own. Where that is out of reach,
# `make audit ADVISORIES=no` checks the rest, and says what it left out.
DENY := $(TARGET)/tools/bin/cargo-deny
ABOUT := $(TARGET)/tools/bin/cargo-about
CYCLONEDX := $(TARGET)/tools/bin/cargo-cyclonedx
audit: build-needs $(DENY) ## check licences, sources and known holes of what is linked; ADVISORIES=no
	$(DENY) --log-level error check --hide-inclusion-graph $(if $(filter no,$(ADVISORIES)),licenses bans sources)
	$(if $(filter no,$(ADVISORIES)),@echo 'Known holes (advisories) were not looked for.')

licences: $(TARGET)/licences.txt ## write the licences of what is linked to target/licences.txt, for whoever ships a binary

$(TARGET)/licences.txt: Cargo.lock Cargo.toml cli/Cargo.toml packaging/about.toml packaging/about.hbs | build-needs $(ABOUT)
	{ $(foreach manifest,Cargo.toml cli/Cargo.toml,$(ABOUT) generate --locked --fail --config packaging/about.toml \
		--manifest-path $(manifest) packaging/about.hbs &&) true; } > $@.new
	mv $@.new $@

$(DENY):
	cargo install --quiet --locked --root $(TARGET)/tools --version 0.20.2 cargo-deny

# Its release profile optimizes over all crates at link time, which takes longer than all else.
$(ABOUT):
	CARGO_PROFILE_RELEASE_LTO=off cargo install --quiet --locked --root $(TARGET)/tools --version 0.9.3 --features cli cargo-about

.PHONY: dist test-packages

# TARGETS='x86_64-unknown-linux-gnu …' names what must be built; without it, what Rust is here for.
dist: build-needs licences $(TARGET)/tools/zig/bin/cargo-zigbuild $(CYCLONEDX) ## make a release in dist/: archives, packages, checksums, what is in them
	$(call need,command -v file && command -v dpkg-deb,file dpkg)
	$(if $(TARGETS),TARGETS='$(TARGETS)') packaging/dist

# zig links for an old glibc on a new system, and for other architectures.
$(TARGET)/tools/zig/bin/cargo-zigbuild:
	$(call need,python3 -c 'import ensurepip',python3-venv)
	python3 -m venv $(TARGET)/tools/zig
	$(TARGET)/tools/zig/bin/pip install --quiet cargo-zigbuild==0.24.0 ziglang==0.17.1

$(CYCLONEDX):
	cargo install --quiet --locked --root $(TARGET)/tools --version 0.5.9 cargo-cyclonedx

test-packages: ## test what `make dist` made: packages, images, units, metrics; needs root
	packaging/tests/all

lint: build-needs ## check format and lints
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	rustfmt --check --edition 2024 tests/fuzz/targets/*.rs
	cargo clippy --manifest-path tests/fuzz/Cargo.toml --target-dir $(TARGET)/fuzz-check -- -D warnings

clean: ## remove what was built
	cargo clean
	rm -rf .venv

# The real-input tests speak through redis-py.
.venv/ready: tests/python/requirements.txt | test-needs
	python3 -m venv .venv
	.venv/bin/pip install --quiet --requirement $<
	touch $@

build-needs:
	@command -v cargo >/dev/null || { echo 'Install Rust: https://rustup.rs' >&2; exit 1; }
	$(call need,command -v cc,gcc libc6-dev)
	$(call need,[ "$$LIBCLANG_PATH" ] || find /usr/lib* -name libclang.so | grep .,libclang-dev)

# Debian starts a server on port 6379 as soon as it is installed: not ours, and in our way.
server-needs:
	$(call need,command -v redis-server,redis-server,$(SUDO) systemctl disable --now redis-server 2>/dev/null || true)

test-needs: $(if $(SERVER),,server-needs)
	$(call need,python3 -c 'import ensurepip',python3-venv)
	$(call need,command -v openssl,openssl)
