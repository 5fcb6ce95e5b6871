"""Says what pyproject.toml cannot: conf/ is installed as spec_lab.conf, and kernels/spec_kernels/ as spec_kernels."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["spec_lab", "spec_lab.*"]), "spec_lab.conf", *find_packages("kernels")],
    package_dir={"spec_lab.conf": "conf", "spec_kernels": "kernels/spec_kernels"},
)
