"""The import rule of CONTRIBUTING.md, checked with transformers' own remote-code scanner.

A folder on the Hub holds the flat files side by side; what the scanner cannot follow breaks there and nowhere else.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

ROOT = Path(__file__).parents[1]
PACKAGES = ("modeling_dsv4", "processing_dsv4")
ENTRIES = [ROOT / "modeling_dsv4" / f"modeling_deepseek_{family}.py" for family in ("v41", "v4")]
# What remote code may import without a guard: an exported folder must load with these alone.
ALLOWED = {"torch", "transformers", "safetensors", "tokenizers", "numpy", "PIL", "huggingface_hub"}


def flat_files(package):
    return sorted(path for path in (ROOT / package).glob("*.py") if path.name != "__init__.py")


FLAT = [path for package in PACKAGES for path in flat_files(package)]


def layer_table():
    """Layer of every flat modeling file, from the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    return {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)`", names)}


def relative_imports(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def test_the_table_lists_every_flat_modeling_file_once():
    assert set(layer_table()) == {path.stem for path in flat_files("modeling_dsv4")}


@pytest.mark.parametrize("path", flat_files("modeling_dsv4"), ids=lambda p: p.stem)
def test_imports_point_strictly_down(path):
    layers = layer_table()
    for node in relative_imports(path):
        assert layers[node.module] < layers[path.stem], f"{path.stem} imports {node.module}"


@pytest.mark.parametrize("path", FLAT, ids=lambda p: p.stem)
def test_relative_imports_are_flat(path):
    for node in relative_imports(path):
        assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)


@pytest.mark.parametrize("path", FLAT, ids=lambda p: p.stem)
def test_the_scanner_sees_exactly_the_imports_of_the_code(path):
    # Its regular expression also reads docstrings; a line there that looks like an import would be followed.
    assert set(get_relative_imports(path)) == {node.module for node in relative_imports(path)}


@pytest.mark.parametrize("path", FLAT, ids=lambda p: p.stem)
def test_unguarded_third_party_imports_are_few(path):
    third_party = {name for name in get_imports(path) if name not in sys.stdlib_module_names}
    assert third_party <= ALLOWED


def test_the_entries_reach_every_flat_modeling_file():
    reached = {Path(file).resolve() for entry in ENTRIES for file in get_relative_import_files(str(entry))}
    assert reached | set(ENTRIES) == {path.resolve() for path in flat_files("modeling_dsv4")}


def test_the_families_do_not_import_each_other():
    for entry, other in (ENTRIES, ENTRIES[::-1]):
        reached = {Path(file).stem for file in get_relative_import_files(str(entry))}
        assert not {other.stem, other.stem.replace("modeling", "configuration")} & reached


def test_file_names_are_unique_and_hide_nothing():
    names = [path.stem for path in FLAT]
    assert len(set(names)) == len(names)
    taken = (
        set(sys.stdlib_module_names) | ALLOWED | set(PACKAGES) | {"accelerate", "peft", "kernels", "triton", "convert"}
    )
    assert not set(names) & taken


@pytest.mark.parametrize("path", FLAT, ids=lambda p: p.stem)
def test_remote_code_does_not_look_beside_itself(path):
    assert "__file__" not in path.read_text(encoding="utf-8")


def test_processing_does_not_import_modeling():
    for path in flat_files("processing_dsv4"):
        assert "modeling_dsv4" not in get_imports(path)


def test_the_reference_shares_no_code_with_the_package():
    for path in (ROOT / "tests" / "reference").glob("*.py"):
        if not path.name.startswith("test_"):
            assert not {"modeling_dsv4", "processing_dsv4", "convert"} & set(get_imports(path)), path.name
