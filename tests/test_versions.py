"""The releases of JAX that are admitted are those that are tested, and any other is named."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from shardplan import _jax
from shardplan.errors import JaxVersionError, UndescribedPrimitiveError
from shardplan.tdl import Call, describe
from shardplan.tdl.describe import rule
from shardplan.tdl.releases import RECORDS, compared, differences, installed, recorded_text, records
from shardplan.versions import NEWEST, OLDEST, TESTED, is_tested, minor, warn_of_untested

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(name: str, python: str, requirements: list[str]) -> Requirement:
    """The requirement of a package that holds on this Python."""
    every = [Requirement(text) for text in requirements]
    (one,) = [r for r in every if r.name == name and (r.marker is None or r.marker.evaluate({"python_version": python}))]
    return one


@pytest.mark.parametrize("name", ["jax", "jax-cuda13-pjrt", "jax-cuda13-plugin"])
def test_the_ranges_admit_the_tested_minor_releases_alone(name: str) -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu-aot"]]
    for release, python in TESTED.items():
        assert required(name, python, requirements).specifier.contains(release)
    for python in TESTED.values():
        (major, least), (_, most) = minor(OLDEST), minor(NEWEST)
        for outside in (f"{major}.{least - 1}.9", f"{major}.{most + 1}.0"):
            assert not required(name, python, requirements).specifier.contains(outside)


@pytest.mark.parametrize("name", ["jax", "jaxlib", "flax", "optax", "numpy", "scipy"])
def test_what_is_installed_is_within_the_ranges(name: str) -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    specifier = required("jax" if name == "jaxlib" else name, python, requirements).specifier
    assert specifier.contains(version(name))


def test_an_untested_release_is_one_warning_with_the_versions() -> None:
    with pytest.warns(
        UserWarning, match=r"JAX 0\.99\.1 is untested with this shardplan, whose tests run on JAX .*" + NEWEST
    ) as seen:
        warn_of_untested("0.99.1")
    assert len(seen) == 1


@pytest.mark.parametrize("release", [*TESTED, "none"])
def test_a_tested_release_is_no_warning(release: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested(release)


def test_importing_warns_of_an_untested_release(environment: dict[str, str], tmp_path: Path) -> None:
    metadata = tmp_path / "jax-99.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 99.0.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import shardplan"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stderr.count("JAX 99.0.0 is untested") == 1


def test_the_installed_release_is_the_recorded_one(request: pytest.FixtureRequest) -> None:
    """With ``--update-golden`` the record of the installed release is written anew."""
    if request.config.getoption("--update-golden"):
        RECORDS.write_text(recorded_text(installed()), encoding="utf-8")
    found = differences()
    assert (found.new, found.gone, found.changed) == ((), (), {})


def test_every_tested_release_is_recorded() -> None:
    assert list(records()) == list(TESTED)


def test_differences_name_what_is_new_gone_and_changed() -> None:
    found = compared("1.0", {"old": (), "top_k": ("axis", "k"), "tanh": ()}, {"new": (), "top_k": ("is_stable", "k"), "tanh": ()})
    assert (found.new, found.gone, found.changed) == (("new",), ("old",), {"top_k": ("+is_stable", "-axis")})


def test_a_parameter_that_is_gone_is_an_error_with_the_version() -> None:
    params = _jax.Parameters("cumsum", {"dimension": 0})
    call = Call("cumsum", ((4,),), ((4,),), params, ("float32",), ("float32",))
    named = rf"JAX {version('jax')} has changed the primitive 'cumsum': it records no parameter 'axis', but dimension; "
    with pytest.raises(JaxVersionError, match=named):
        describe(call)
    assert params.get("axis") is None


def test_a_scan_of_another_form_is_an_error_with_the_version() -> None:
    eqn = SimpleNamespace(primitive=SimpleNamespace(name="scan"), params={"jaxpr": None, "split": (1, 2)})
    with pytest.raises(JaxVersionError, match="'scan': its parameters are jaxpr, split"):
        _jax.params_of(eqn)


def test_an_undescribed_primitive_of_an_untested_jax_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "untested" not in str(UndescribedPrimitiveError("warp", "here"))
    for module in ("errors", "versions"):
        monkeypatch.setattr(f"shardplan.{module}.jax_version", lambda: "0.99.1")
    assert f"JAX 0.99.1 is untested: install a release of JAX that shardplan is tested with ({', '.join(TESTED)})" in str(
        UndescribedPrimitiveError("warp", "here")
    )


def test_a_rule_for_other_releases_is_not_registered() -> None:
    @rule("from_the_future", since="99.0")
    @rule("from_the_past", until="0.1")
    def _(call: Call) -> tuple[()]:
        return ()

    assert describe(Call("from_the_future", (), (), {}, (), ())) is None
    assert describe(Call("from_the_past", (), (), {}, (), ())) is None


def test_versions_are_compared_in_one_place() -> None:
    """`shardplan.versions` alone takes versions apart, and these files ask it. A version that is only recorded is no question."""
    asking = {
        "__init__.py",
        "errors.py",
        "shell/agreement.py",
        "shell/doctor.py",
        "tdl/describe.py",
        "tdl/releases.py",
        "tdl/xla_quirks.py",
    }
    recording = {"calibrate/profiling.py"}
    found: set[str] = set()
    reading: set[str] = set()
    for path in sorted((ROOT / "shardplan").rglob("*.py")):
        name, tree = str(path.relative_to(ROOT / "shardplan")), ast.parse(path.read_text(encoding="utf-8"))
        imported = {f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        found |= (
            {name} if any(i.startswith(("shardplan.versions", "packaging", "importlib.metadata")) for i in imported) else set()
        )
        reading |= {name} if used & {"jax.__version__", "jaxlib.__version__", "jax.version", "jaxlib.version"} else set()
    assert found - {"versions.py"} <= asking
    assert reading <= recording
    assert is_tested(version("jax"))
