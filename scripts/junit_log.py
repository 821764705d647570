"""A pytest plugin that writes a JUnit file after every test instead of at the end of the run.

    python -m pytest tests/gpu -p scripts.junit_log --junit-log results.xml

If pytest is killed or crashes, the file has every result so far and names the test that was
running. If it is started again with the same file, it skips the tests in it. A CUDA error makes
every later call of the process fail, so pytest stops after it with exit code CUDA_ERROR, and the
remaining tests need a new process.
"""

import os
import pathlib
import re
from typing import Any
from xml.etree import ElementTree

CUDA_ERROR = 86
"""Exit code of pytest after a CUDA error other than running out of memory."""

_CUDA_ERROR = re.compile("CUDA_ERROR_(?!OUT_OF_MEMORY)")

_NOT_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

RUNNING = "pytest ended during this test"


class JunitLog:
    """Writes the file of one run of pytest."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._suite = _read(path)
        self._case = ElementTree.Element("testcase")
        self._running = ElementTree.Element("error", message=RUNNING)
        self._has_cuda_error = False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        done = {(case.get("classname"), case.get("name")) for case in self._suite}
        again = [item for item in items if _name(item.nodeid) in done]
        items[:] = [item for item in items if _name(item.nodeid) not in done]
        config.hook.pytest_deselected(items=again)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        classname, name = _name(nodeid)
        names = {"classname": classname, "name": name, "time": "0"}
        self._case = ElementTree.SubElement(self._suite, "testcase", names)
        self._running = ElementTree.SubElement(self._case, "error", message=RUNNING)
        self._write()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._case.set("time", f"{float(self._case.get('time', 0)) + report.duration:.3f}")
        if report.failed or report.skipped:
            kind = "failure" if report.when == "call" else "error"
            if report.skipped:
                kind = "skipped"
            is_reason = isinstance(report.longrepr, tuple)  # of a skip: file, line and reason
            text = _NOT_XML.sub("?", report.longrepr[2] if is_reason else report.longreprtext)
            errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            message = errors[0] if errors else text[:200]
            ElementTree.SubElement(self._case, kind, message=message).text = text
            self._has_cuda_error |= bool(report.failed and _CUDA_ERROR.search(text))
        if report.when == "teardown" and report.user_properties:
            properties = ElementTree.SubElement(self._case, "properties")
            for name, value in report.user_properties:
                figure = {"name": name, "value": _NOT_XML.sub("?", str(value))}
                ElementTree.SubElement(properties, "property", figure)

    def pytest_runtest_logfinish(self) -> None:
        self._case.remove(self._running)
        self._write()
        if self._has_cuda_error:
            import pytest

            pytest.exit("a CUDA error: later tests need a new process", returncode=CUDA_ERROR)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        ElementTree.ElementTree(self._suite).write(new, encoding="utf-8", xml_declaration=True)
        os.replace(new, self._path)


def num_tests(path: pathlib.Path) -> int:
    """Number of tests in a file, finished or not."""
    return len(_read(path))


def summarize(path: pathlib.Path) -> str:
    """Counts and time of the tests in a file. Example: `56 passed, 2 failed in 231 s`."""
    counts = _counts(path)
    seconds = sum(float(case.get("time", 0)) for case in _read(path))
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{words} in {seconds:.0f} s" if words else "no tests"


def has_passed(path: pathlib.Path) -> bool:
    """True if a test in a file passed, and all tests that started finished without a failure."""
    counts = _counts(path)
    return counts["passed"] > 0 and counts["failed"] == counts["not finished"] == 0


def _counts(path: pathlib.Path) -> dict[str, int]:
    counts = dict.fromkeys(("passed", "failed", "skipped", "not finished"), 0)
    for case in _read(path):
        ended = [child for child in case if child.tag != "properties"]
        if any(child.get("message") == RUNNING for child in ended):
            counts["not finished"] += 1
        elif any(child.tag in ("failure", "error") for child in ended):
            counts["failed"] += 1
        else:
            counts["skipped" if ended else "passed"] += 1
    return counts


def _read(path: pathlib.Path) -> ElementTree.Element:
    """The test suite of a file; an empty one if there is no file."""
    if not path.exists():
        return ElementTree.Element("testsuite", name="pytest")
    return ElementTree.parse(path).getroot()


def _name(nodeid: str) -> tuple[str, str]:
    """Class name and name of a test, as pytest's own JUnit files have them for functions."""
    path, _, name = nodeid.partition("::")
    return path.removesuffix(".py").replace("/", "."), name


def pytest_addoption(parser: Any) -> None:
    text = "JUnit file, written after every test"
    parser.addoption("--junit-log", metavar="FILE.xml", type=pathlib.Path, help=text)


def pytest_configure(config: Any) -> None:
    path = config.getoption("--junit-log")
    if path is not None:
        config.pluginmanager.register(JunitLog(path.resolve()))
