"""Lists that mix models, taken apart. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from state_store.model import ModelKey


def indexes_by_model(model_keys: Sequence[ModelKey]) -> dict[ModelKey, list[int]]:
    """Indexes of the items of each model, in order."""
    indexes: defaultdict[ModelKey, list[int]] = defaultdict(list)
    for index, model_key in enumerate(model_keys):
        indexes[model_key].append(index)
    return indexes
