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

.PHONY: help build run install test lint clean build-needs server-needs test-needs

help: ## show this
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

build: build-needs ## build the module and the command into target/release
	cargo build --release

run: build server-needs ## start a redis-server with the module on PORT (6379), data in a temporary folder
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT INT TERM && \
	printf '%s\n' 'Try in another terminal, and end the server with Ctrl-C:' \
		'  redis-cli -p $(PORT) LOCK.ACQUIRE door alice 30000' \
		'  redis-cli -p $(PORT) LOCK.INFO door' \
		'  redis-cli -p $(PORT) LOCK.RELEASE door alice' && \
	redis-server --port $(PORT) --dir "$$dir" --save '' --loadmodule '$(abspath $(MODULE))'

install: | $(MODULE) $(COMMAND) ## install the module to /usr/lib/redis/modules, the command to PREFIX/bin
	install -D -m 0755 $(MODULE) $(DESTDIR)$(MODULES)/liblockkeeper.so
	install -D -m 0755 $(COMMAND) $(DESTDIR)$(PREFIX)/bin/lockkeeper

# So that `sudo make install` after `make build` needs no cargo.
$(MODULE) $(COMMAND):
	$(MAKE) build

test: build test-needs .venv/ready ## run all tests, on the redis-server in SERVER if it is set
	$(if $(SERVER),LOCKKEEPER_TEST_SERVER='$(abspath $(SERVER))') cargo test --workspace --no-fail-fast

lint: build-needs ## check format and lints
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

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
