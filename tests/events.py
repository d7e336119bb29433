"""What a run wrote for TensorBoard, read back by its own reader."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EVERYTHING = {"scalars": 0, "images": 0, "histograms": 0}


def read(directory):
    events = EventAccumulator(str(directory), size_guidance=EVERYTHING)
    return events.Reload()


def scalar(events, name):
    return [(event.step, event.value) for event in events.Scalars(name)]


def points(folder, name):
    """Return the points of all files, in the order of their steps."""
    return sorted(point for path in folder.glob("events*") for point in scalar(read(path), name))
