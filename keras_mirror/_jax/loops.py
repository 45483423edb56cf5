"""What Keras calls as `model.train_function`: steps over an iterator."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from keras_mirror._jax.batch import Batches
from keras_mirror._jax.state import digest
from keras_mirror._jax.steps import StepFunction


def _next_number(iterator: Any) -> int:
    """Of the batch that is asked for; data outside of a `fit` is one batch."""
    if not isinstance(iterator, Batches):
        return 1
    iterator.asked += 1
    return iterator.asked


def over_iterator(
    step: StepFunction,
    steps_per_execution: int,
    join: Callable[[list[Any]], Any],
    *,
    what: str,
) -> Callable[[Any, Iterator[Any]], Any]:
    """What Keras calls as `model.train_function` and its siblings.

    Args:
        step: One step.
        steps_per_execution: How many batches one call takes; fewer at the end.
        join: Puts the outputs of these steps together.
        what: What the steps do with a batch, for errors.
    """
    together = step.worker_batches(what)

    def function(state: Any, iterator: Iterator[Any]) -> Any:
        found = []
        take = iterator.take if isinstance(iterator, Batches) else iterator.__next__
        part = None if together is None else step.part(iterator)
        for number in range(steps_per_execution):
            try:
                if together is None:
                    data = take()
                else:
                    data = together.take(
                        take,
                        part,
                        nth=_next_number(iterator),
                        is_first=number == 0,
                        set_anew=step.set_anew(state),
                        digest=functools.partial(digest, state),
                    )
            except BaseException as error:
                is_end = isinstance(error, StopIteration)
                if found and is_end:
                    break
                if step.is_resumed and is_end:
                    step.is_resumed = False
                    return step.logs_so_far(state), state
                step.give_back(state, error)
                raise
            step.is_resumed = False
            outputs, state = step(state, data)
            found.append(outputs)
        return join(found), state

    function.strategy = step.strategy  # pyright: ignore[reportFunctionMemberAccess]
    function.step = step  # pyright: ignore[reportFunctionMemberAccess]
    function.is_stale = step.is_stale  # pyright: ignore[reportFunctionMemberAccess]
    return function
