"""A backend that counts what passes through it."""

from forge.backends.reference import ReferenceBackend, ReferenceOperations


class _CountingOperations(ReferenceOperations):
    def __init__(self, products: list[tuple[int, int]]):
        self.products = products

    def linear(self, x, matrix):
        self.products.append((len(x), len(matrix)))
        return super().linear(x, matrix)


class CountingBackend(ReferenceBackend):
    """`reference`, noting the rows of every matrix product together with the matrix's own number of rows."""

    def __init__(self):
        super().__init__()
        self.products: list[tuple[int, int]] = []

    def run(self, forward_pass, batch, storage):
        return forward_pass(_CountingOperations(self.products), batch, storage)
