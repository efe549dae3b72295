"""What the image is built from."""

import tomllib

import pytest
from manifests import K8S, ROOT

FOUND = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
PACKAGES = [pattern.removesuffix("*") for pattern in FOUND["include"]]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_in_the_context_of_the_build(package):
    ignored = (K8S / "image" / "Dockerfile.dockerignore").read_text().splitlines()
    assert (ROOT / package / "__init__.py").exists()
    assert f"!{package}" in ignored
