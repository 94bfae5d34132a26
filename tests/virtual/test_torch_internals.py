"""Each private name of another library has an entry, and each entry is seen to change, in one line."""

import ast
import dataclasses
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.spec import private_names
from trainfit.spec.errors import InputError
from trainfit.spec.optional import is_installed
from trainfit.spec.private_names import ABSENT, PrivateName, change, form_of, read
from trainfit.virtual import torch_internals
from trainfit.virtual.torch_internals import GROUPS, changes, entries
from trainfit.virtual.trace.exclusive import exclusive, replaced
from trainfit.virtual.trace.gradient_accumulation import sole_reference_counts

SOURCE = Path(private_names.__file__).parents[1]
TABLES = (SOURCE / "spec/private_names.py", SOURCE / "virtual/torch_internals")
LIBRARIES = {*private_names.CHECKED, "diffusers", "datasets"}
STANDARD_LIBRARY = {"_asdict", "_replace", "_make", "_fields", "_exit", "_getframe", "_SimpleCData"}
OWN_STRINGS = set(
    """
    _TRAINFIT_COMPLETE _s _mean_s _std_s _max _fp4 _nf4 _mult _enabled _generator _init
    _fused _fused_ _foreach _foreach_ _amp_foreach _amp_foreach_ _compile
    _c10d_functional _c10d_functional_autograd
    _amp _scaled_dot_product_
    _from_model_config _name_or_path _diffusers_version
    _component_ _hybrid_shard_zero2 _id
""".split()
)
"""Parts of our own names and of operators' names, and keys of files, that are written as strings."""
OWN_STRINGS |= set(
    """
    _apply _call_impl _init_group _init_state _load_from_state_dict _load_parameter_into_model
    _load_state_dict_into_meta_model
""".split()
)
"""Functions that the stacks of a memory snapshot may name, of any version; none is called."""
ENTRIES = [one for group in GROUPS for one in entries(group)]
NAMED_BY_RESULT = {name for one in ENTRIES if isinstance(one.result, list) for name in map(str, one.result)}
"""Attributes of our objects that a library looks for, which the result of a small call names."""
LAST = {one.dotted.rpartition(".")[2] for one in ENTRIES} | NAMED_BY_RESULT


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@functools.cache
def trees() -> dict[Path, ast.Module]:
    files = [path for path in sorted(SOURCE.rglob("*.py")) if not any(path.is_relative_to(t) for t in TABLES)]
    return {path: ast.parse(path.read_text()) for path in files}


@functools.cache
def own_names() -> set[str]:
    """Return the private names that trainfit's own source defines."""
    found = set[str]()
    for tree in trees().values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


def aliases(tree: ast.Module) -> dict[str, str]:
    """Return what names in a file stand for, of the libraries."""
    found = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                first = one.name.partition(".")[0]
                found |= {one.asname: one.name} if one.asname else {first: first}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return {name: full for name, full in found.items() if full.partition(".")[0] in LIBRARIES}


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    """Return the full name of ``a.b.c`` where ``a`` stands for something of a library."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join([known[node.id], *reversed(parts)])


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each use of a private name; a leading dot: an attribute of some object."""
    known = aliases(tree)
    for name in known.values():
        if any(map(is_private, name.split("."))):
            yield 1, name
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node, known)
            if name is not None and any(map(is_private, name.split("."))):
                yield node.lineno, name
            elif name is None and is_private(node.attr) and node.attr not in own_names():
                yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            for word in node.value.replace("::", " ").split():
                if re.fullmatch(r"_[a-zA-Z][a-zA-Z0-9_]*", word):
                    yield node.lineno, f".{word}"
        elif (patched := owner_and_name(node)) is not None:
            full = dotted(patched[0], known)
            full = full and f"{full}.{patched[1]}"
            if full and (not full.startswith("torch.") or any(map(is_private, full.split(".")))):
                yield node.lineno, full


def owner_and_name(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Return what is patched in ``replaced(owner, "name", ...)`` or a tuple ``(owner, "name", ...)``."""
    match node:
        case ast.Call(func=ast.Name(id="replaced"), args=[owner, ast.Constant(value=str(name)), *_]):
            return owner, name
        case ast.Tuple(elts=[owner, ast.Constant(value=str(name)), _]):
            return owner, name
    return None


def operators() -> set[str]:
    """Return the names of PyTorch's operators."""
    return {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}


def has_entry(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    if not owner:
        return last in LAST
    return any(
        one.dotted == name
        or one.dotted.startswith(f"{name}.")  # A module or class on the way
        or (":" in one.name and name.startswith(f"{one.dotted}."))  # A part of it, such as an overload
        or one.dotted.split(".")[-2:] == name.split(".")[-2:]  # The same, imported from another module
        for one in ENTRIES
    )


@pytest.mark.parametrize("path", trees(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_in_the_source_have_entries(path: Path) -> None:
    free = own_names() | STANDARD_LIBRARY | OWN_STRINGS
    if path.name == "op_kinds.py":
        free |= operators()  # Sorted by name into kinds: a name that is gone is without effect.
    missing = {
        f"{path}:{line}: {name}"
        for line, name in used(trees()[path])
        if not has_entry(name)
        and not (name.startswith(".") and (name[1:] in free or name.startswith("._trainfit_")))
    }
    assert not missing


def test_operators_of_the_catalog_have_entries() -> None:
    schemas = re.findall(r"\b(\w+)::(\w+)", (SOURCE / "catalog/collectives.toml").read_text())
    private = {
        f"torch.ops.{space}.{name}" for space, name in schemas if is_private(space) or is_private(name)
    }
    assert private
    assert not {name for name in private if not has_entry(name)}


def test_every_entry_is_used() -> None:
    source = "\n".join(path.read_text() for path in [*trees(), SOURCE / "catalog/collectives.toml"])
    words = set(re.findall(r"\w+", source))
    names = {one.name: {one.dotted.rpartition(".")[2]} for one in ENTRIES}
    for one in ENTRIES:
        if isinstance(one.result, list):
            names[one.name] |= {str(name) for name in one.result if is_private(str(name))}
    assert not [name for name, found in names.items() if not found & words]


def test_entries_are_distinct() -> None:
    names = [one.name for one in ENTRIES]
    assert sorted(set(names)) == sorted(names)


def test_the_checked_versions_are_those_of_the_requirements() -> None:
    def pinned(file: str) -> dict[str, str]:
        lines = (SOURCE.parents[1] / "requirements" / file).read_text().splitlines()
        pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
        return {name: ".".join(version.split()[0].split(".")[:2]) for name, version in pins.items()}

    newest, oldest = pinned("constraints.txt") | pinned("libraries.txt"), pinned("oldest.txt")
    for library, versions in private_names.CHECKED.items():
        first, _, last = versions.partition(" to ")
        assert (last or first) == newest.get(library, last or first), library
        assert first == oldest.get(library, first), library


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_changed_in_the_installed_versions(group: str) -> None:
    assert changes(entries(group)) == []


def test_checks_leave_the_process_as_it_is(monkeypatch) -> None:
    """A fake mode of PyTorch replaces CUDA's device guard, for the thread that ends with the check."""

    def called() -> None:
        raise AssertionError("replaces the device guard of the process")

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", called)
    with pytest.raises(AssertionError), FakeTensorMode():
        pass
    assert [line for group in GROUPS for line in changes(entries(group))] == []
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_a_default_dtype_of_the_users_is_no_change() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert [line for group in GROUPS for line in changes(entries(group))] == []
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(before)


def test_a_library_whose_import_fails_is_a_line_and_hides_no_other(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('no such driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    one = entries("tracing")[0]
    monkeypatch.setattr(torch_internals, "is_installed", lambda library: True)
    monkeypatch.setitem(private_names.CHECKED, "broken_library", "1")
    names = ("broken_library:name", "torch:there_is_no_such_name")
    found = changes(dataclasses.replace(one, name=name) for name in names)
    assert len(found) == 2
    assert any("cannot be reached: RuntimeError: no such driver" in line for line in found)


def test_warnings_that_are_errors_are_no_change() -> None:
    def warns(owner: object, name: str) -> object:
        warnings.warn("deprecated", stacklevel=2)
        return read(owner, name)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(torch_internals, "stored", warns)
        assert changes(entries("tracing")) == []


class _Other:
    """What no entry's object is."""


def _of_other_form(form: str) -> object:
    def other(only_this_argument: int) -> None: ...

    return _Other() if form.startswith("(") or form in ("class", "module", "builtin") else other


def _misbehaving(stored: object) -> object:
    """Return an object of the same form that does nothing, or has nothing in it."""
    if isinstance(stored, staticmethod | classmethod):
        return type(stored)(_misbehaving(stored.__func__))
    if inspect.isdatadescriptor(stored):
        return property(lambda self: object())
    if isinstance(stored, list):
        return []

    @functools.wraps(stored)  # Its form is that of what it wraps.
    def nothing(*_: object, **__: object) -> object:
        return _Other

    return nothing


@pytest.fixture(autouse=True)
def _counts_anew() -> Iterator[None]:
    """Forget what was observed while a name was broken."""
    yield
    sole_reference_counts.cache_clear()


@pytest.fixture
def broken():
    """Return a function that checks an entry while ``value`` is in the place of its object."""

    def check(one: PrivateName, value: object) -> str:
        _, _, attributes = one.name.partition(":")
        last = (attributes or one.name).rpartition(".")[2]
        owners = []
        change(one, lambda owner, name: owners.append(owner) or read(owner, name))
        if not owners:
            pytest.skip("its module cannot be imported in this build")
        target = owners[-1]

        def patched(owner: object, name: str) -> object:
            if name != last or owner != target:
                return read(owner, name)
            if value is ABSENT:
                raise AttributeError(name)
            return value

        return change(one, patched)

    return check


def fresh_results() -> None:
    torch_internals._known_changes.cache_clear()


@pytest.fixture
def results(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """The folder of kept results, empty."""
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    fresh_results()
    yield tmp_path
    fresh_results()


def test_a_changed_name_ends_a_prediction_with_one_line(results, monkeypatch, capsys) -> None:
    from trainfit.cli.main import main

    monkeypatch.setattr(
        torch._C, "_storage_Use_Count", functools.wraps(torch._C._storage_Use_Count)(lambda _: 7)
    )
    assert main(["predict", "gpt2", "--no-cache"]) == 65
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        f"trainfit: error: torch {torch.__version__}: torch._C._storage_Use_Count returns 0 in a small call, "
        "was 1; needed for whether autograd adds a gradient in place; checked with torch 2.11 to 2.13; "
        "install torch 2.11 to 2.13"
    )
    assert main(["--version", "-v"]) == 65
    assert "torch._C._storage_Use_Count returns 0" in capsys.readouterr().out


@pytest.mark.processes
def test_a_name_that_is_gone_ends_a_prediction_before_it_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys, torch._subclasses.fake_tensor as module; del module.run_fallback_kernel\n"
        "del module.in_kernel_invocation_manager\n"
        "from trainfit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "predict", "gpt2"], capture_output=True, text=True,
        env=os.environ | {"TRAINFIT_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 65
    assert "fake_tensor.in_kernel_invocation_manager is gone; needed for" in done.stderr
    assert re.search(r"\(and \d+ more: trainfit --version -v\)", done.stderr)
    assert "Traceback" not in done.stderr


def test_results_are_kept_by_versions(results: Path, monkeypatch) -> None:
    torch_internals.require("tracing", "models")
    (kept,) = results.iterdir()
    assert json.loads(kept.read_text()) == {"tracing": [], "models": []}
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_internals._file() == kept  # The same before the libraries are imported
    monkeypatch.undo()
    monkeypatch.setenv("TRAINFIT_CACHE", str(results))
    fresh_results()
    monkeypatch.setattr(torch_internals, "changes", lambda checked: ["torch 2.99: a name changed"])
    torch_internals.require("tracing", "models")  # Not checked again
    with pytest.raises(InputError, match="a name changed"):
        torch_internals.require("ranks")
    monkeypatch.setattr(torch_internals, "installed_version", lambda library: "2.99.0")
    fresh_results()
    with pytest.raises(InputError, match="a name changed"):
        torch_internals.require("tracing")
    fresh_results()
    monkeypatch.setattr(torch_internals, "changes", lambda checked: [])
    torch_internals.require("tracing")  # What changed is checked again, as the library may be repaired.


@pytest.mark.parametrize("content", ["", "[1]", '{"tracing": 7}', "\0"])
def test_a_damaged_result_is_checked_again(results: Path, content: str) -> None:
    torch_internals.require("tracing")
    (kept,) = results.iterdir()
    kept.write_text(content)
    fresh_results()
    torch_internals.require("tracing")
    assert json.loads(kept.read_text()) == {"tracing": []}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TRAINFIT_CACHE", str(file / "cache"))
    fresh_results()
    torch_internals.require("tracing")


def test_a_check_in_a_trace_sees_what_the_trace_has_replaced() -> None:
    from torch._inductor import memory

    with exclusive(), torch.device("meta"), replaced(memory, "estimate_peak_memory", lambda: 0):
        with replaced(memory, "estimate_peak_memory", lambda *_: 1):
            assert changes(entries("compiler")) == []
        assert changes(entries("compiler")) == []
    assert changes(entries("compiler")) == []


def test_an_unexpected_error_names_a_changed_private_name(results, monkeypatch) -> None:
    assert torch_internals.explain(AttributeError("x")) == ""
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert "torch._C._storage_Use_Count is gone" in torch_internals.explain(AttributeError("x"))
    assert torch_internals.explain(ValueError("x")) == ""


CHECKABLE = [one for one in ENTRIES if is_installed(one.library)]
entry_id = lambda one: one.name  # noqa: E731


@pytest.mark.parametrize("one", CHECKABLE, ids=entry_id)
def test_a_name_that_is_gone_or_has_another_form_is_seen(one: PrivateName, broken) -> None:
    if ABSENT not in one.forms:
        assert broken(one, ABSENT) == "is gone"
    for form in one.forms:
        other = _of_other_form(form)
        line = broken(one, other)
        assert line.startswith(f"is now {form_of(other)}, was {one.forms[0]}"), line


@pytest.mark.parametrize("one", [one for one in CHECKABLE if one.call is not None], ids=entry_id)
def test_another_result_of_a_small_call_is_seen(one: PrivateName, broken) -> None:
    stored = None

    def remember(owner: object, name: str) -> object:
        nonlocal stored
        stored = read(owner, name)
        return stored

    assert change(one, remember) == ""
    line = broken(one, _misbehaving(stored))
    assert re.match(r"(fails|returns .*) in a small call", line), line


UNCHANGED = """
from trainfit.virtual.torch_internals import changes, entries
from trainfit.virtual.trace.gradient_accumulation import sole_reference_counts
assert changes([*entries("tracing"), *entries("models"), *entries("ranks")]) == []
print(len(sole_reference_counts()))
"""


@pytest.mark.processes
def test_a_process_trains_after_the_checks() -> None:
    """PyTorch's own fake mode, in a CUDA build without a GPU, is an invalid access in the next backward."""
    done = subprocess.run([sys.executable, "-c", UNCHANGED], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr[-2000:]


@pytest.mark.parametrize("function", [str.upper, list.append, torch._C._current_autograd_node])
def test_a_signature_that_python_3_13_generates_is_none_of_the_library(function: object) -> None:
    """``($self, /)`` and ``($self, object, /)`` stand for no declaration, so the form is that of 3.11."""
    assert form_of(function) == "builtin"
