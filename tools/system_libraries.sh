#!/usr/bin/env bash
# Installs what pip cannot, for tests: the shared libraries that the mooncake package loads, and etcd; with --slow,
# Chromium and Prometheus too. `make test` and `make test-slow` run this. Where it cannot, the tests of mooncake, of
# etcd, of the dashboard in a browser and of deploy/prometheus are skipped.
set -euo pipefail

ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
present=$("$ldconfig" -p)
packages=()
for pair in libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4; do
    grep -qF "${pair%=*}" <<<"$present" || packages+=("${pair#*=}")
done
command -v etcd >/dev/null || packages+=(etcd-server)
if [[ ${1-} == --slow ]]; then
    command -v chromedriver >/dev/null || packages+=(chromium chromium-driver)
    command -v promtool >/dev/null || packages+=(prometheus)
fi
((${#packages[@]})) || exit 0

run=()
((EUID == 0)) || run=(sudo -n)
if ! command -v apt-get >/dev/null || ! "${run[@]}" true 2>/dev/null; then
    echo "Tests of the mooncake transport, of etcd, of the dashboard or of deploy/prometheus are skipped: install ${packages[*]} (apt-get install; elsewhere the same)." >&2
    exit 0
fi
"${run[@]}" apt-get update -qq
# RUNLEVEL=1: the service of a server is not started.
for package in "${packages[@]}"; do
    "${run[@]}" env RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$package" ||
        echo "$package cannot be installed: its tests are skipped." >&2
done
