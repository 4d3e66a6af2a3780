"""A backend that counts what passes through it."""

from forge.backends.reference import ReferenceBackend


class CountingBackend(ReferenceBackend):
    """`reference`, noting the rows of every matrix product together with the matrix's own number of rows."""

    def __init__(self):
        self.products: list[tuple[int, int]] = []

    def linear(self, x, matrix):
        self.products.append((len(x), len(matrix)))
        return super().linear(x, matrix)
