"""Put on PYTHONPATH of a server under test: lets a test strike inside its processes and ask what they hold. The product has no hook for it.

Points. $FAULTS_POINTS is a JSON table, name → [module, attribute path, type name or null]; a name begins with the process that it is in.
Modules are wrapped as they are imported. Where a file $FAULTS_DIR/NAME.before (.after) lies when NAME is called (has returned), the
process takes it, by renaming it to ….fired with its pid inside, and does what stood in it: kill, stop, delay SECONDS, raise. With a type
name, only calls with an argument of that type count. NAME.poison has the rid of a request that kills the process every time.

Census. On SIGUSR2 a process writes to $FAULTS_DIR/census-PID how many instances of each of Sterna's classes are alive in it, and how much
the containers among their attributes hold.
"""

import functools
import gc
import inspect
import json
import os
import re
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from wrap_on_import import Points, wrap_on_import


def process_name() -> str:
    match = re.search(r"sterna\.(\w+)\.process", " ".join(sys.orig_argv))
    return match[1] if match else "server"


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # it takes effect a moment later


class Striker:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def hit(self, name: str) -> None:
        order = f"{self._folder}/{name}"
        try:
            os.rename(order, f"{order}.taken")
        except FileNotFoundError:
            return
        act = Path(f"{order}.taken").read_text()
        Path(f"{order}.fired-").write_text(str(os.getpid()))
        os.rename(f"{order}.fired-", f"{order}.fired")
        match act.split():
            case ["kill"]:
                kill_itself()
            case ["stop"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["delay", seconds]:
                time.sleep(float(seconds))
            case ["raise"]:
                raise RuntimeError("a fault that a test injected")

    def taste(self, name: str, args: Sequence[Any]) -> None:
        poison = Path(f"{self._folder}/{name}.poison")
        if poison.exists():
            each = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
            if any(getattr(item, "rid", None) == poison.read_text() for item in each):
                kill_itself()

    def wrap(self, name: str, takes: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        def counts(args: Any) -> bool:
            return takes is None or any(type(arg).__name__ == takes for arg in args)

        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if counts(args):
                    self.hit(f"{name}.before")
                yield from function(*args, **kwargs)
                if counts(args):
                    self.hit(f"{name}.after")
        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if not counts(args):
                    return function(*args, **kwargs)
                self.taste(name, args)
                self.hit(f"{name}.before")
                result = function(*args, **kwargs)
                self.hit(f"{name}.after")
                return result

        return wrapper


def attributes(each: Any) -> Iterator[tuple[str, Any]]:
    names = list(getattr(each, "__dict__", ()))
    for cls in type(each).__mro__:
        slots = vars(cls).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    for name in names:
        value = getattr(each, name, None)
        if isinstance(value, dict | set | list | deque):
            yield name, value


def take_census(folder: str) -> None:
    gc.collect()
    alive: Counter[str] = Counter()
    for each in gc.get_objects():
        cls = type(each)
        if not str(cls.__module__).startswith(("sterna.", "__main__")):
            continue
        name = f"{cls.__module__}.{cls.__qualname__}"
        alive[name] += 1
        for attribute, held in attributes(each):
            alive[f"{name}.{attribute}"] += len(held)
    alive["blocks"] = sys.getallocatedblocks()
    path = f"{folder}/census-{os.getpid()}"
    Path(f"{path}-").write_text(json.dumps(alive))
    os.rename(f"{path}-", path)


if "FAULTS_DIR" in os.environ:
    here = process_name()
    striker = Striker(os.environ["FAULTS_DIR"])
    points: Points = {}
    for point, (module, attribute, takes) in json.loads(os.environ["FAULTS_POINTS"]).items():
        if point.partition(".")[0] == here:
            points.setdefault(module, []).append((attribute, functools.partial(striker.wrap, point, takes)))
    wrap_on_import(points)
    signal.signal(signal.SIGUSR2, lambda *_: take_census(os.environ["FAULTS_DIR"]))
