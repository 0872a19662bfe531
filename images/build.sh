#!/usr/bin/env bash
# Builds the images with whatever is here: docker, podman or buildah. Called by `make images`.
#   BASE      base image (python:3.11-slim)
#   REGISTRY  comes before the names, with a slash
#   TAG       0.1.0-python3.11: what the pipeline and the chart ask for
#   IMAGES    which ones ("base trainer vllm")
#   ENGINE    docker, podman or buildah; found when empty
#   ENGINE_OPTIONS  further options of the build, separated by blanks
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
base=${BASE:-python:3.11-slim}
registry=${REGISTRY:+${REGISTRY%/}/}
tag=${TAG:-$version-python3.11}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)

engine=${ENGINE:-}
if [ -z "$engine" ]; then
  for candidate in docker podman buildah; do
    # the docker command may be there without its daemon
    if command -v "$candidate" >/dev/null && timeout 20 "$candidate" info >/dev/null 2>&1; then
      engine=$candidate
      break
    fi
  done
fi
if [ -z "$engine" ]; then
  echo "make images needs docker (with its daemon running), podman or buildah; none of them works here" >&2
  exit 2
fi

read -r -a options <<< "${ENGINE_OPTIONS:-}"
for image in ${IMAGES:-base trainer vllm}; do
  if [ ! -f "images/$image/Dockerfile" ]; then
    echo "IMAGES: there is no image $image; there are base, trainer and vllm" >&2
    exit 2
  fi
  name="${registry}muster-$image:$tag"
  echo "$engine builds $name"
  "$engine" build "${options[@]}" --build-arg "BASE=$base" --build-arg "VERSION=$version" \
    --build-arg "REVISION=$revision" --file "images/$image/Dockerfile" --tag "$name" .
done
