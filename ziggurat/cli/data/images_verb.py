"""`ziggurat images …`: vectors of pictures, the scale model that picks their resolution, progressive JPEGs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb

if TYPE_CHECKING:
    from ziggurat.runs.images.embed import Embedded

_EMBED_EPILOG = """Writes one row a picture (picture, vector, resolution, bytes_read), and beside it FILE_refused.csv
with the reason of each file that has no vector: broken, too large, CMYK, more than 8 bits, animated, no picture.
Needs timm (pip install 'ziggurat-rec[images]') and a file of weights. Killed, it goes on by the same command.
examples:
  ziggurat images embed shop/ --weights efficientnet-lite0.pth --out vectors.parquet
  ziggurat images embed shop/ --backbone resnet18 --weights resnet18.safetensors --resolution 160 --out vectors.parquet
"""


def add_images_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `images` does, and the arguments of each."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    def action(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary, epilog=epilog)

    _add_embed(action("embed", "turn pictures into vectors by a pretrained network", _EMBED_EPILOG))


def _add_embed(parser: argparse.ArgumentParser) -> None:
    _add_pictures(parser)
    _add_backbone(parser)
    add_output(parser, "--out", suffix=".parquet", metavar="FILE", required=True, help="the table of vectors, .parquet")
    parser.add_argument(
        "--resolution", type=int, default=224, metavar="R", help="side of all pictures (default: %(default)s)"
    )
    _add_batch(parser)
    _add_limits(parser)
    add_verbose(parser)


def _add_pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pictures", nargs="+", help="folders (all their files, by their path below the folder), files or globs"
    )


def _add_backbone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backbone",
        metavar="NAME",
        default="tf_efficientnet_lite0",
        help="network, as timm calls it (default: %(default)s)",
    )
    parser.add_argument(
        "--weights", metavar="FILE", required=True, help="its weights: .safetensors, or .pth with tensors alone"
    )


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="B", help="pictures computed together (default: %(default)s)"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-pixels",
        type=int,
        default=50_000_000,
        metavar="N",
        help="a picture with more is refused before it is decoded (default: %(default)s)",
    )


def images(options: argparse.Namespace, rest: list[str]) -> int:
    """Do what is named behind `images`."""
    return _embed(options)


def _embed(options: argparse.Namespace) -> int:
    from ziggurat.data.pictures.found import find_pictures
    from ziggurat.data.pictures.picture_file import PictureLimits
    from ziggurat.models.images import BackboneConfig
    from ziggurat.runs.images.embed import EmbedConfig, embed_pictures
    from ziggurat.training.report.progress import show_progress

    config = EmbedConfig(
        resolution=options.resolution,
        batch_size=options.batch_size,
        limits=PictureLimits(max_pixels=options.max_pixels),
    )
    pictures = find_pictures(options.pictures)
    done = embed_pictures(
        pictures,
        backbone=BackboneConfig(name=options.backbone, weights=options.weights).build(),
        out=options.out,
        config=config,
        progress=show_progress(verbose=options.verbose),
    )
    _print_embedded(done, out=options.out)
    return 0


def _print_embedded(done: Embedded, *, out: str) -> None:
    from ziggurat.runs.images.embed import refused_beside

    rows = [(f"{resolution}", f"{count:,}") for resolution, count in sorted(done.resolutions.items())]
    print_table(("resolution", "pictures"), rows)
    print_line(f"{done.num_pictures:,} vectors written to {out}")
    print_line(
        f"{done.bytes_read:,} bytes read; files of embedded pictures have {done.bytes_there:,}; "
        f"{done.flops / 1e9:,.1f} GFLOPs"
    )
    if done.num_resumed:
        print_line(f"{done.num_resumed:,} pictures were done before")
    num_refused = sum(done.refused.values())
    if num_refused:
        print_table(("refused", "files"), [(reason, f"{count:,}") for reason, count in done.refused.most_common()])
    print_line(f"{num_refused:,} files were refused; each with its reason: {refused_beside(out)}")


IMAGES = Verb(
    name="images",
    summary="vectors of pictures, as a feature of any model",
    epilog=(
        "examples:\n  ziggurat images embed shop/ --weights efficientnet-lite0.pth --out vectors.parquet\n"
        "  ziggurat images embed 'shop/*.jpg' --backbone resnet18 --weights resnet18.safetensors --out vectors.parquet"
    ),
    add_arguments=add_images_arguments,
    run=images,
)
