"""Data sets as users write them, whose rows are those of some tensors."""

from torch.utils.data import Dataset, IterableDataset


class RowByRow(Dataset):
    """Read by index; unlike torch's TensorDataset, nobody can see its tensors."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in self.tensors)


class RowByName(RowByRow):
    """Rows that are dicts, by the tensors' names."""

    def __init__(self, **tensors):
        super().__init__(*tensors.values())
        self.names = tuple(tensors)

    def __getitem__(self, index):
        return dict(zip(self.names, super().__getitem__(index), strict=True))


class Stream(IterableDataset):
    """The rows one after another; it says the length of all to whoever asks, and has the first
    `num_rows` of them."""

    def __init__(self, *tensors, num_rows=None):
        self.tensors, self.num_rows = tensors, num_rows

    def __len__(self):
        return len(self.tensors[0])

    def __iter__(self):
        return zip(*(tensor[: self.num_rows] for tensor in self.tensors), strict=True)
