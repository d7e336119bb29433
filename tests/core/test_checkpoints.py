"""Of a folder's checkpoint nothing is read but data of this run; all else is refused in a sentence."""

import importlib
import os
import pickle
import pkgutil
import zipfile
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from problems import assert_same_bits, every
from valley import kept, run

import metafop
from metafop import SGD, Adam, Momentum, Training, functional, meta_training
from metafop.hypergradients import EvolutionCarry


class Touch:
    """Runs code when it is read as a pickle is."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@every(
    "write",
    {
        "saved": lambda bad, path, whole: torch.save(bad, path),
        "among the notes": lambda bad, path, whole: torch.save(whole | {"notes": {"a": bad}}, path),
        "in a state": lambda bad, path, whole: torch.save(
            whole | {"state": whole["state"]._replace(meta_opt=bad)}, path
        ),
        "old form": lambda bad, path, whole: torch.save(bad, path, _use_new_zipfile_serialization=False),
        "pickled": lambda bad, path, whole: path.write_bytes(pickle.dumps(bad)),
    },
)
def test_a_hostile_file_is_refused_and_does_not_run(write, tmp_path):
    run(tmp_path, steps=2)
    write(Touch(tmp_path / "ran"), tmp_path / "checkpoint.pt", kept(tmp_path))
    refused(tmp_path)
    assert not (tmp_path / "ran").exists()


def refused(folder, words="damaged"):
    """A file is refused in one sentence with its path and the remedy, and stays as it is."""
    checkpoint = folder / "checkpoint.pt"
    before = checkpoint.read_bytes()
    with pytest.raises(ValueError, match=words) as caught:
        run(folder, steps=4)
    message = str(caught.value)
    assert message.startswith(f"{checkpoint} is damaged, or was not written by this version of meta_train (")
    assert message.endswith("). Move it away to start anew, or pass another folder.")
    assert len(message) < len(str(checkpoint)) + 300
    assert "\n" not in message
    assert checkpoint.read_bytes() == before


def zipped(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello.txt", "hello")


FOREIGN = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "without its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("a checkpoint\n"),
    "zip": zipped,
    "a tensor": lambda path: torch.save(torch.ones(2), path),
    "a state_dict": lambda path: torch.save(torch.nn.Linear(2, 2).state_dict(), path),
    "a list": lambda path: torch.save([1, 2, 3], path),
    "a dict": lambda path: torch.save({"format": "meta_train 3"}, path),
    "a module": lambda path: torch.save(torch.nn.Linear(2, 2), path),
}


@every("write", FOREIGN)
def test_a_file_that_is_not_of_a_run_is_refused(write, tmp_path):
    run(tmp_path, steps=2)
    write(tmp_path / "checkpoint.pt")
    refused(tmp_path)


def _with_carry(whole, carry):
    return {"state": whole["state"]._replace(carry=carry)}


CHANGED = {
    "another format": lambda whole: {"format": "meta_train 2"},
    "settings cut": lambda whole: {"settings": whole["settings"][:1]},
    "no history": lambda whole: {"history": None},
    "a history of lists": lambda whole: {"history": [[1.0], [2.0]]},
    "a state of another kind": lambda whole: {"state": tuple(whole["state"])},
    "a state without meta": lambda whole: {"state": whole["state"]._replace(meta=())},
    "a state of other names": lambda whole: {
        "state": whole["state"]._replace(meta=whole["state"].meta._replace(precond={"v": torch.eye(3)}))
    },
    "no tensor": lambda whole: _with_carry(whole, whole["state"].carry._replace(params={"w": [1.0, 2.0]})),
    "another carry": lambda whole: _with_carry(
        whole, EvolutionCarry(whole["state"].carry, (), torch.ones(2))
    ),
}


@every("change", CHANGED)
def test_a_checkpoint_of_another_structure_is_refused(change, tmp_path):
    run(tmp_path, steps=2)
    whole = kept(tmp_path)
    torch.save(whole | change(whole), tmp_path / "checkpoint.pt")
    refused(tmp_path)


def test_a_checkpoint_of_an_older_version_is_refused_by_name(tmp_path, monkeypatch):
    run(tmp_path, steps=2)
    whole = kept(tmp_path)
    old = namedtuple("_Run", ["state", "history", "notes"], module="metafop.meta_training")
    monkeypatch.setattr(meta_training, "_Run", old, raising=False)
    content = (whole["settings"][0], old(*(whole[name] for name in old._fields)))
    torch.save(content, tmp_path / "checkpoint.pt")
    refused(tmp_path, r"metafop\.meta_training\._Run")


def test_a_flipped_bit_is_noticed(tmp_path):
    run(tmp_path, steps=2)
    checkpoint = tmp_path / "checkpoint.pt"
    whole, same = checkpoint.read_bytes(), run(steps=2)
    with zipfile.ZipFile(checkpoint) as file:
        tensors = [info.header_offset for info in file.infolist() if "/data/" in info.filename]
    for place in [*range(0, len(whole), len(whole) // 40), *(start + 100 for start in tensors)]:
        checkpoint.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            resumed = run(tmp_path, steps=2)
        except ValueError as error:
            assert str(checkpoint) in str(error)  # noqa: PT017  # or it was in nothing that counts
        else:
            assert_same_bits(resumed.state, same.state)
            assert resumed.history == same.history


class Velocity(NamedTuple):
    velocity: Any


class Derived(Velocity):
    pass


@dataclass
class Box:
    velocity: Any


@dataclass(frozen=True)
class Boxed(Momentum):
    """Momentum whose state is an object of a class of the user's."""

    box: Any = Velocity

    def init(self, params):
        return self.box(super().init(params))

    def update(self, hyper, params, opt: Any, direction):
        params, velocity = super().update(hyper, params, opt.velocity, direction)
        return params, self.box(velocity)

    def pullback(self, hyper, params, opt: Any, direction, cotangent):
        return super().pullback(hyper, params, opt.velocity, direction, cotangent)


def test_the_namedtuples_of_a_user_are_read_and_not_made_safe_for_others(tmp_path):
    run(tmp_path, steps=2, windows=3, optimizer=Boxed())
    resumed = run(tmp_path, steps=5, windows=3, optimizer=Boxed())
    assert_same_bits(resumed.state, run(steps=5, windows=3, optimizer=Boxed()).state)
    assert Velocity not in torch.serialization.get_safe_globals()
    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
        kept(tmp_path)


def test_classes_that_a_user_made_safe_stay_safe(tmp_path):
    torch.serialization.add_safe_globals([Velocity, Derived])
    try:
        for box in (Velocity, Derived):
            run(tmp_path / box.__name__, steps=2, windows=3, optimizer=Boxed(box=box))
            run(tmp_path / box.__name__, steps=4, windows=3, optimizer=Boxed(box=box))
            assert isinstance(kept(tmp_path / box.__name__)["state"].carry.opt, box)
    finally:
        torch.serialization._weights_only_unpickler._remove_safe_globals([Velocity, Derived])


def test_what_could_not_be_read_later_is_refused_before_the_first_step(tmp_path):
    class Local(NamedTuple):
        velocity: Any

    for box in (Local, Derived, Box):
        with pytest.raises(
            ValueError, match=rf"{tmp_path} cannot keep this run.*{box.__name__}.*add_safe_globals"
        ):
            run(tmp_path, steps=2, windows=3, optimizer=Boxed(box=box))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_torch_load_reads_every_state_of_the_library():
    names = [module.name for module in pkgutil.walk_packages(metafop.__path__, "metafop.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    found = {
        x
        for module in modules
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, tuple) and x.__module__.startswith("metafop.")
    }
    inside = {
        "Differentiation",
        "Estimated",
        "Factor",
        "Outer",
        "Preset",
        "Run",
        "Solution",
        "Trained",
        "Verdict",
    }  # of a call, or made for a person
    inside |= {"Built", "Cut", "RecordedStep", "Second"}  # of a step that is recorded or compiled
    inside |= {
        "MeanGradient",
        "MetaAndStart",
        "Leaf",
        "ParamSpec",
        "Preconditioned",
        "SettingKeys",
    }  # of a step of FOP
    public = {x.__name__: x for x in found if not x.__name__.startswith("_") and "verify" not in x.__module__}
    safe = set(torch.serialization.get_safe_globals())
    assert {name for name, x in public.items() if x not in safe} == inside


def test_a_state_comes_back_from_a_plain_torch_load(tmp_path, generator):
    loss = functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    families = {"w": metafop.Rescaled(metafop.Kronecker(), limit=0.5)}
    scheduled, params = metafop.Scheduled(Adam(), 3), {"w": torch.ones(2, 3)}
    training = Training(loss, scheduled, families)
    meta = training.init_meta(params, generator, lr=0.1)
    online = metafop.Online(training, SGD())
    state, _ = online.step(
        online.init_meta(meta, lr=0.1), online.init(meta, training.init(params)), torch.zeros(2, 3)
    )
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert type(loaded) is metafop.OnlineCarry
    assert_same_bits(loaded, state)
