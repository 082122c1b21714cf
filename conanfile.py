# SPDX-License-Identifier: MIT
"""Conan recipe of the C++ library: conan create . [-o cuda=True]

The package is coterie::core, as find_package(coterie) gives it; tests/package is its test.
"""
import re
from pathlib import Path

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout


class CoterieRecipe(ConanFile):
    name = "coterie"
    description = "Content-clustered attention"
    license = "MIT"
    topics = ("attention", "transformers", "cuda")
    settings = "os", "arch", "compiler", "build_type"
    package_type = "static-library"
    options = {"cuda": [True, False]}
    default_options = {"cuda": False}
    exports_sources = (
        "CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*", "cases/*", "python/CMakeLists.txt",
        "formats/CMakeLists.txt", "report/CMakeLists.txt", "train/CMakeLists.txt", "apps/CMakeLists.txt")

    def set_version(self):
        text = Path(self.recipe_folder, "CMakeLists.txt").read_text()
        self.version = re.search(r"project\(coterie VERSION ([0-9.]+)", text)[1]

    def layout(self):
        cmake_layout(self)

    def validate(self):
        check_min_cppstd(self, 17)  # of the headers; the library itself is compiled as C++20

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.variables["COTERIE_CUDA"] = "ON" if self.options.cuda else "OFF"
        toolchain.variables["COTERIE_TOGETHER"] = "ON"
        for part in ("TORCH", "PYTHON", "TESTS", "BENCH", "APPS"):
            toolchain.variables[f"COTERIE_{part}"] = "OFF"
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build(target="coterie_core")

    def package(self):
        CMake(self).install(component="development")

    def package_info(self):
        # The package has its own CMake files; Conan must not write others.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/coterie"]
        self.cpp_info.libs = ["coterie_core"]
        self.cpp_info.system_libs = ["pthread", "m"]
