"""Which data a worker reads in parts, and how it then reads them."""

import pickle

import keras
import pytest
import torch

from keras_mirror.worker_data import py_dataset, torch_loader

ROWS = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10) * 2)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def get_part(self, index, part, num_parts):
        return (index, part, num_parts)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(10)


def loader(**options):
    return torch.utils.data.DataLoader(ROWS, **{"batch_size": 4} | options)


def rows(batches):
    return [batch[0].tolist() for batch in batches]


def test_a_py_dataset_keeps_its_options_in_parts_and_can_be_pickled():
    dataset = Batches(workers=3, use_multiprocessing=True, max_queue_size=5)
    assert py_dataset.has_parts(dataset)
    own = pickle.loads(pickle.dumps(py_dataset.OwnRows(dataset, 1, 2)))
    assert own[2] == (2, 1, 2) and own.num_batches == 3
    assert (own.workers, own.use_multiprocessing, own.max_queue_size) == (3, True, 5)


def test_a_loader_in_parts_yields_all_rows_of_each_batch():
    found = [rows(torch_loader.own_rows(loader(), k, 3)) for k in range(3)]
    assert found == [[[0], [4], []], [[1], [5], [8]], [[2, 3], [6, 7], [9]]]


def test_a_loader_in_parts_keeps_its_options():
    own = torch_loader.own_rows(
        loader(num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=7),
        0,
        2,
    )
    assert own.num_workers == 2 and own.prefetch_factor == 3
    assert own.persistent_workers and own.timeout == 7 and len(own) == 3


@pytest.mark.parametrize(
    "other",
    [
        torch.utils.data.DataLoader(Endless(), batch_size=4),
        loader(batch_size=None),
        loader(collate_fn=lambda samples: samples),
        loader(in_order=False),
        [1, 2],
    ],
    ids=["iterable", "no batches", "own collate_fn", "any order", "no loader"],
)
def test_what_cannot_be_divided_is_read_whole(other):
    assert torch_loader.has_parts(loader())
    assert not torch_loader.has_parts(other)
