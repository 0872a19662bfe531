#!/usr/bin/env bash
# Builds a real kube-apiserver and kube-controller-manager (1.20.2) from Debian's source package, and unpacks Debian's
# etcd, for the tests of this folder. Nothing is installed system-wide but dpkg-dev, where it is missing.
#
# Usage: build.sh TARGET_DIR     -> TARGET_DIR/{etcd,kube-apiserver,kube-controller-manager}
#
# Needs Debian 12 with apt and its configured mirror (root only to install dpkg-dev), about
# 3 GB of scratch space beside TARGET_DIR (removed at the end) and 190 s on two cores.
set -euo pipefail

for tool in apt-get dpkg openssl; do
  command -v "$tool" >/dev/null || { echo "build.sh: $tool is not installed: this builds on Debian 12 only" >&2; exit 2; }
done
if ! command -v dpkg-source >/dev/null; then
  [ "$(id -u)" = 0 ] || { echo "build.sh: dpkg-source is not installed: apt-get install dpkg-dev" >&2; exit 2; }
  apt-get -qq update && apt-get -qq install -y --no-install-recommends dpkg-dev >/dev/null
fi

mkdir -p "$1"
target=$(cd "$1" && pwd)
work=$(mktemp -d "$target.build.XXXXXX")
cleanup() { chmod -R u+w "$work" 2>/dev/null || true; rm -rf "$work"; }
trap cleanup EXIT
cd "$work"
mkdir -p lists/partial cache/archives/partial debs root bin gopath/src/k8s.io gotmp

# The machine's own Debian sources, with source packages enabled, in lists of our own.
if [ -f /etc/apt/sources.list.d/debian.sources ]; then
  sources=$work/src.sources
  sed 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources > "$sources"
elif [ -f /etc/apt/sources.list ]; then
  sources=$work/src.list
  sed -n 's/^deb \(.*\)/deb \1\ndeb-src \1/p' /etc/apt/sources.list > "$sources"
else
  echo "build.sh: neither /etc/apt/sources.list.d/debian.sources nor /etc/apt/sources.list is here: this builds on Debian only" >&2
  exit 2
fi
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$sources" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" source --download-only kubernetes >/dev/null
(
  cd debs
  "${apt[@]}" download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev golang-github-json-iterator-go-dev etcd-server >/dev/null
  for deb in *.deb; do dpkg -x "$deb" ../root; done
)

kubernetes=$work/gopath/src/k8s.io/kubernetes
dpkg-source -x --no-check ./*.dsc "$kubernetes" >/dev/null
# The vendored reflect2 and json-iterator panic under Go 1.19 at the first CRD: take Debian's.
for module in modern-go/reflect2 json-iterator/go; do
  rm -rf "$kubernetes/vendor/github.com/$module"
  cp -rL "root/usr/share/gocode/src/github.com/$module" "$kubernetes/vendor/github.com/$module"
done

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/gocache GOTMPDIR=$work/gotmp
export GOFLAGS= GOPROXY=off GO111MODULE=off CGO_ENABLED=0 PATH=$work/root/usr/lib/go-1.19/bin:$PATH
cd "$kubernetes"
# The OpenAPI definitions are generated at build time upstream, so they are not in the source package.
go build -o "$work/bin/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(
  (
    find pkg cmd plugin -name '*.go' -type f
    find -L vendor/k8s.io -name '*.go' -type f | grep -v -e ^vendor/k8s.io/code-generator/ -e ^vendor/k8s.io/sample-apiserver/
  ) | grep -v -e zz_generated -e _test.go -e _examples | xargs grep -l '^// *+k8s:openapi-gen=' \
    | xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,
)
"$work/bin/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations.report" 2>/dev/null
component=k8s.io/kubernetes/vendor/k8s.io/component-base/version
go build -ldflags "-s -w -X $component.gitVersion=v1.20.2 -X $component.gitMajor=1 -X $component.gitMinor=20" \
  -o "$work/bin/" k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager

cp "$work/root/usr/bin/etcd" "$work/bin/kube-apiserver" "$work/bin/kube-controller-manager" "$target/"
