"""Matrix factorisation by alternating least squares (Hu, Koren and Volinsky, ICDM 2008), of the library implicit.

    python -m benchmarks.peers.implicit_als IN.npz OUT.npz      in .venv-bench

IN has the likes of the training rows (users, items), those before each question (offsets, values), and settings; OUT
the factors of items, and of the user of each question, folded in from what the user liked before it.
"""

import sys

import numpy as np
from implicit.als import AlternatingLeastSquares
from scipy.sparse import csr_matrix


def main(source: str, target: str) -> None:
    """Fit, fold in, write."""
    given = np.load(source)
    num_items, settings = int(given["num_items"]), given["settings"]
    factors, regularization, alpha, iterations, seed = settings.tolist()
    users, items = given["users"], given["items"]
    likes = csr_matrix((np.ones(len(users), np.float32), (users, items)), shape=(int(users.max()) + 1, num_items))
    likes.data[:] = 1.0  # a movie liked twice is liked
    model = AlternatingLeastSquares(
        factors=int(factors),
        regularization=regularization,
        alpha=alpha,
        iterations=int(iterations),
        random_state=int(seed),
        use_gpu=False,
    )
    model.fit(likes, show_progress=False)
    offsets, values = given["offsets"], given["values"]
    before = csr_matrix((np.ones(len(values), np.float32), values, offsets), shape=(len(offsets) - 1, num_items))
    asked = model.recalculate_user(np.arange(len(offsets) - 1), before)
    np.savez(target, items=np.asarray(model.item_factors), users=np.asarray(asked))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
