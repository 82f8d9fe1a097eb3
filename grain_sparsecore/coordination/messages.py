"""What exceptions of readers say, whatever they are like."""

import traceback

# Characters of an exception's text that are shown; some hold a whole batch.
_SHOWN_CHARACTERS = 2000


def describe_error(error: BaseException) -> str:
    """``Type: text``, at most 2,000 characters of text that can be encoded.

    Readers raise all kinds of exceptions: with a text that itself raises, with lone
    surrogates out of file names, or without any text.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as failure:
        return f"{name} (whose text raises {type(failure).__name__})"
    text = text[:_SHOWN_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return f"{name}: {text}" if text else name


def comes_from_a_record(stop: StopIteration) -> bool:
    """Whether it left a record of a MapDataset, where nothing ends.

    A bare ``next`` in somebody's map lets one slip. Taken for the end, it would cut
    off the rest of the data, on all hosts, without a word.
    """
    frames = traceback.walk_tb(stop.__traceback__)
    return any(frame.f_code.co_name == "__getitem__" for frame, _ in frames)
