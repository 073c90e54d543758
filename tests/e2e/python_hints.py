# SPDX-License-Identifier: Apache-2.0
"""Whether everything public has type hints; python.py and transformers_test.py run this."""
import functools
import inspect
import os
import re
import typing
import unittest

from e2e_rig import ROOT, kvq

SPECIAL = ("__init__", "__enter__", "__exit__")  # the others are as Python calls them


def callables_of(package):
    """Everything public that can be called, by name: functions, and the methods and properties
    that a class has from this project."""
    for name in package.__all__:
        value = getattr(package, name)
        if not inspect.isclass(value):
            if callable(value):
                yield name, value
            continue
        for base in value.__mro__:
            if not base.__module__.startswith("kvq"):
                continue
            for member, made in vars(base).items():
                if member.startswith("_") and member not in SPECIAL:
                    continue
                if isinstance(made, (staticmethod, classmethod)):
                    made = made.__func__
                elif isinstance(made, property):
                    made = made.fget
                elif isinstance(made, functools.cached_property):
                    made = made.func
                if inspect.isfunction(made):
                    yield f"{name}.{member}", made


def faults_of(name, function):
    """What is wrong with the hints and the docstring of one of them."""
    signature = inspect.signature(function)
    own = inspect.unwrap(function)
    for parameter in signature.parameters.values():
        if parameter.annotation is parameter.empty and parameter.name != "self":
            yield f"{name}: no hint for {parameter.name}"
    if signature.return_annotation is signature.empty:
        yield f"{name}: no hint for the result"
    for of, hint in own.__annotations__.items():
        if "|" in str(hint):
            yield f"{name}: the hint of {of} is {hint}: Python 3.9 has no |"
    try:
        typing.get_type_hints(function)
    except Exception as error:  # whatever a hint can raise
        yield f"{name}: {type(error).__name__}: {error}"
    if not name.rpartition(".")[2].startswith("__") and not own.__doc__:
        yield f"{name}: no docstring"


def faults(package):
    return [fault for name, function in callables_of(package)
            for fault in faults_of(name, function)]


class Hints(unittest.TestCase):
    """py.typed says that the package has hints: they are complete, and can be looked up."""

    def test_everything_public_has_hints(self):
        names = [name for name, _ in callables_of(kvq)]
        for known in ("merge_states", "Queue.step", "Layer.dim_of_v", "Step.__exit__"):
            self.assertIn(known, names)
        self.assertEqual(faults(kvq), [])

    def test_calls_of_the_readme(self):
        """They are written as they are."""
        path = os.path.join(ROOT, "client", "python", "README.md")
        with open(path, encoding="utf-8") as file:
            told = re.findall(r"^\| `(\w+)\.(\w+)\((.*?)\)` \| ", file.read(), re.M)
        self.assertGreater(len(told), 12)
        for owner, name, arguments in told:
            signature = inspect.signature(getattr(getattr(kvq, owner), name))
            kept = [p.replace(annotation=p.empty) for p in signature.parameters.values()
                    if p.name != "self"]
            want = signature.replace(parameters=kept, return_annotation=signature.empty)
            text = re.sub(r"<class 'numpy\.(\w+)'>", r"np.\1", str(want))
            self.assertEqual(f"({arguments})", text, f"{owner}.{name}")

    def test_fields_have_hints(self):
        """Of dataclasses, and of what their hints name."""
        for kind in (kvq.Layer, kvq.Pages):
            self.assertEqual(list(typing.get_type_hints(kind)), list(kind.__dataclass_fields__))

    def test_what_is_missing_is_found(self):
        def wanting(self, one, *rest, two: "nowhere.Type" = 0,  # noqa: F821
                    **options: "int | str"):
            pass
        self.assertEqual([fault.split(":", 2)[1].strip() for fault in faults_of("f", wanting)],
                         ["no hint for one", "no hint for rest", "no hint for the result",
                          "the hint of options is int | str", "NameError", "no docstring"])
