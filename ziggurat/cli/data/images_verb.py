"""`ziggurat images …`: vectors of pictures, the scale model that picks their resolution, progressive JPEGs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.runs.images.embed import EmbeddedPictures

_EMBED_EPILOG = """Writes one row a picture (picture, vector, resolution, bytes_read), and beside it FILE_refused.csv
with the reason of each file that has no vector: broken, too large, CMYK, more than 8 bits, animated, no picture.
Needs timm (pip install 'ziggurat-rec[images]') and a file of weights. Killed, it goes on by the same command.
examples:
  ziggurat images embed shop/ --weights efficientnet-lite0.pth --out vectors.parquet
  ziggurat images embed shop/ --backbone resnet18 --weights resnet18.safetensors --resolution 160 --out vectors.parquet
"""
_SCALE_EPILOG = """Learns on a sample of pictures which are good enough when small, for `images embed --scale-model`.
Good is a vector near that of the whole file (--tau), or with --by-class one that gives the class away: the folder in
which a picture lies. How well it does is measured on pictures that were held out. It is surer of pictures that it has
learned on than of others, and lets them be small: learn on a small part of what will be embedded, or on other pictures.
examples:
  ziggurat images scale shop/ --weights efficientnet-lite0.pth --by-class --out scale.json
  ziggurat images scale shop/ --weights lite0.pth --resolutions 96,224,288 --scans 4,6,0 --tau 0.85 --out scale.json
"""
_PROGRESSIVE_EPILOG = """Copies whose first bytes are a small picture: a scale model lets the rest be read where needed.
Given again, it goes on. FOLDER_refused.csv has the reason of each file without a copy.
example:
  ziggurat images progressive shop/ --out shop_progressive
"""


def add_images_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `images` does, and the arguments of each."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    def action(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary, epilog=epilog)

    _add_embed(action("embed", "turn pictures into vectors by a pretrained network", _EMBED_EPILOG))
    _add_scale(action("scale", "learn which pictures are good enough when they are small", _SCALE_EPILOG))
    _add_progressive(action("progressive", "write pictures as progressive JPEG", _PROGRESSIVE_EPILOG))


def _add_embed(parser: argparse.ArgumentParser) -> None:
    _add_pictures(parser)
    _add_backbone(parser)
    add_output(parser, "--out", suffix=".parquet", metavar="FILE", required=True, help="the table of vectors, .parquet")
    parser.add_argument(
        "--resolution", type=int, metavar="R", help="side of all pictures, without --scale-model (default: 224)"
    )
    parser.add_argument(
        "--scale-model", metavar="FILE", default="", help="of `images scale`: picks the resolution of each picture"
    )
    _add_batch(parser)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile kernels for each resolution: half a minute each, then faster; needs a C++ compiler",
    )
    _add_limits(parser)
    add_verbose(parser)


def _add_scale(parser: argparse.ArgumentParser) -> None:
    _add_pictures(parser)
    _add_backbone(parser)
    add_output(parser, "--out", suffix=".json", metavar="FILE", required=True, help="the scale model")
    parser.add_argument(
        "--resolutions", metavar="A,B", default="128,224,288", help="to choose among (default: %(default)s)"
    )
    parser.add_argument(
        "--scans",
        metavar="A,B",
        default="4,6,6",
        help="of a progressive JPEG that each resolution is read of, 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--by-class", action="store_true", help="good is a vector that gives away the folder of the picture"
    )
    parser.add_argument(
        "--tau",
        type=float,
        help="without --by-class: good from this cosine to the vector of the whole file on (default: 0.9)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        help="share of pictures that may come out bad and would be good when large (default: %(default)s)",
    )
    parser.add_argument(
        "--sample", type=int, default=2000, metavar="N", help="pictures to learn from, drawn (default: %(default)s)"
    )
    _add_limits(parser)
    add_verbose(parser)


def _add_progressive(parser: argparse.ArgumentParser) -> None:
    _add_pictures(parser)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the folder of the copies")
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
    return {"embed": _embed, "scale": _scale, "progressive": _progressive}[options.action](options)


def _embed(options: argparse.Namespace) -> int:
    from ziggurat.data.pictures.found import find_pictures
    from ziggurat.data.pictures.picture_file import PictureLimits
    from ziggurat.models.images import BackboneConfig, ScaleModel
    from ziggurat.runs.images.embed import EmbedConfig, embed_pictures, written_with
    from ziggurat.training.report.progress import show_progress

    if options.scale_model and options.resolution is not None:
        raise _idle_flag(f"--resolution {options.resolution}", beside="--scale-model", who="the scale model picks it")
    config = EmbedConfig(
        resolution=224 if options.resolution is None else options.resolution,
        batch_size=options.batch_size,
        compiled=options.compile,
        limits=PictureLimits(max_pixels=options.max_pixels),
    )
    pictures = find_pictures(options.pictures, without=written_with(options.out))
    done = embed_pictures(
        pictures,
        backbone=BackboneConfig(name=options.backbone, weights=options.weights).build(),
        out=options.out,
        scale=ScaleModel.load(options.scale_model) if options.scale_model else None,
        config=config,
        progress=show_progress(verbose=options.verbose),
    )
    _print_embedded(done, out=options.out)
    return 0


def _scale(options: argparse.Namespace) -> int:
    import random
    from pathlib import PurePosixPath

    from ziggurat.data.pictures.found import find_pictures
    from ziggurat.data.pictures.picture_file import PictureLimits
    from ziggurat.models.images import BackboneConfig
    from ziggurat.runs.images.fit_scale import LEAST_PICTURES, ScaleConfig, fit_scale_model, vectors_for_scale
    from ziggurat.training.report.progress import show_progress

    if options.by_class and options.tau is not None:
        raise _idle_flag(f"--tau {options.tau}", beside="--by-class", who="the class says what is good")
    if options.sample < 1:
        raise ConfigError(
            expected="a number of pictures from 1 on",
            found=f"{options.sample}",
            where="command line, --sample",
            ways_out=("--sample 2000", "leave it out"),
        )
    config = ScaleConfig(
        resolutions=_numbers(options.resolutions, flag="--resolutions"),
        num_scans=_numbers(options.scans, flag="--scans"),
        tau=0.9 if options.tau is None else options.tau,
        tolerance=options.tolerance,
    )
    pictures = find_pictures(options.pictures, without=(options.out,))
    num_there = len(pictures)
    if num_there > options.sample:
        pictures = random.Random(config.seed).sample(pictures, options.sample)
    backbone = BackboneConfig(name=options.backbone, weights=options.weights).build()
    if backbone.fixed_resolution:
        raise ConfigError(
            expected="a network that takes several resolutions",
            found=f"{options.backbone}, which takes {backbone.fixed_resolution} alone",
            where="command line, --backbone",
            ways_out=(
                "take a convolutional network: --backbone tf_efficientnet_lite0",
                f"do without a scale model: ziggurat images embed --resolution {backbone.fixed_resolution}",
            ),
        )
    for resolution in config.resolutions:
        backbone.check_resolution(resolution, instead=_in_place_of(resolution, config.resolutions))
    kept, vectors = vectors_for_scale(
        pictures,
        backbone=backbone,
        config=config,
        limits=PictureLimits(max_pixels=options.max_pixels),
        progress=show_progress(verbose=options.verbose),
    )
    fit = fit_scale_model(
        vectors,
        flops=[backbone.flops(resolution) for resolution in config.resolutions],
        backbone=backbone.config.fingerprint(),
        classes=[PurePosixPath(picture.name).parent.name for picture in kept] if options.by_class else None,
        config=config,
    )
    fit.model.save(options.out)
    rows = [
        (f"{resolution}", f"{good:.1%}", f"{share:.1%}", f"{flops / 1e6:,.0f}")
        for resolution, good, share, flops in zip(
            config.resolutions, fit.good, fit.shares, fit.flops_fixed, strict=True
        )
    ]
    print_table(("resolution", "good, if all are there", "chosen for", "MFLOPs a picture"), rows)
    print_line(
        f"chosen: {fit.good_chosen:.1%} good, {fit.flops / 1e6:,.0f} MFLOPs a picture with its thumbnail, "
        f"{fit.flops / fit.flops_fixed[-1]:.2f} of the largest; on {fit.num_pictures:,} pictures, held out in turn"
    )
    if fit.flops >= fit.flops_fixed[-1]:
        print_line(
            f"it saves nothing: all pictures at one resolution cost less (images embed "
            f"--resolution {config.resolutions[-1]}); try others, or more pictures"
        )
    if 2 * len(pictures) > num_there:
        few = num_there // 4
        fewer = f", or learn on fewer (--sample {few})" if few >= LEAST_PICTURES else ""
        print_line(
            f"it has learned on {len(pictures):,} of these {num_there:,} files, and is too sure of them: "
            f"embed others by it{fewer}"
        )
    print_line(f"written to {options.out}")
    return 0


def _progressive(options: argparse.Namespace) -> int:
    from ziggurat.data.pictures.found import find_pictures
    from ziggurat.data.pictures.picture_file import PictureLimits
    from ziggurat.data.pictures.progressive import ProgressiveFolder
    from ziggurat.training.report.progress import show_progress

    progress = show_progress(verbose=options.verbose)
    folder = ProgressiveFolder(options.out, limits=PictureLimits(max_pixels=options.max_pixels))
    pictures = find_pictures(options.pictures, without=(folder.out, folder.refused_path))
    folder.check(pictures)
    progress.begin("write", total=len(pictures))
    for number, picture in enumerate(pictures, start=1):
        folder.write(picture)
        progress.update(number)
    progress.end()
    folder.write_refused()
    done = folder.done
    print_line(
        f"{done.num_rewritten:,} pictures written as progressive JPEG to {options.out}, {done.num_copied:,} copied, "
        f"{done.num_there:,} were there: {done.bytes_before:,} bytes before, {done.bytes_after:,} after"
    )
    if done.others:
        print_line(
            f"{len(done.others):,} other files in {options.out} are copies of none of these pictures, "
            f"the first {done.others[0]}"
        )
    print_line(f"{sum(done.refused.values()):,} files were refused; each with its reason: {folder.refused_path}")
    return 0


def _in_place_of(resolution: int, resolutions: tuple[int, ...]) -> Callable[[int], str]:
    """Return the flag with another resolution, which leaves as many of them."""
    others = {each for each in resolutions if each != resolution}

    def flag(usable: int) -> str:
        free = next(each for each in range(usable, usable + 32 * (len(others) + 1), 32) if each not in others)
        return f"--resolutions {','.join(map(str, sorted({*others, free})))}"

    return flag


def _idle_flag(given: str, *, beside: str, who: str) -> ConfigError:
    flag = given.split()[0]
    return ConfigError(
        expected=f"{flag} without {beside}: {who}",
        found=f"{given} and {beside}",
        where="command line",
        ways_out=(f"leave {flag} out", f"leave {beside} out"),
    )


def _numbers(text: str, *, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            expected="whole numbers with commas between them",
            found=repr(text),
            where=f"command line, {flag}",
            ways_out=f"{flag} 128,224,288" if flag == "--resolutions" else f"{flag} 4,6,6",
        ) from None


def _print_embedded(done: EmbeddedPictures, *, out: str) -> None:
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
