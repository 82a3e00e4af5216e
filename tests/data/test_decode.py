"""From the bytes of a file to pixels: Pillow's, whatever the way."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps

import vitrail
from vitrail.data.transforms.decode import check_size, decode_crop, decode_image, to_channels, to_rgb


def photo(width: int = 320, height: int = 240) -> Image.Image:
    from sklearn.datasets import load_sample_images

    return Image.fromarray(load_sample_images().images[0]).resize((width, height))


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def whole(height: int, width: int) -> tuple[int, int, int, int]:
    return 0, 0, height, width


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("size", [(320, 240), (317, 239), (17, 9), (1, 1)])
def test_a_jpeg_at_full_size_has_the_pixels_of_the_decoder_of_record(subsampling, progressive, size):
    content = encoded(photo(*size), quality=90, subsampling=subsampling, progressive=progressive)
    reference = pixels(Image.open(io.BytesIO(content)))
    assert torch.equal(decode_image(content), reference)
    assert torch.equal(decode_crop(content, whole, (size[1], size[0])), reference)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fast", [True, False])
def test_orientation(orientation, fast):
    image = photo(64, 48)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(image, "JPEG" if fast else "PNG", exif=exif)
    upright = pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    assert torch.equal(decode_image(content), upright)
    found = decode_crop(content, lambda height, width: (4, 6, height - 10, width - 20), (24, 32))
    expected = torch.nn.functional.interpolate(
        upright[None, :, 4:-6, 6:-14].contiguous(memory_format=torch.channels_last),
        size=(24, 32),
        mode="bilinear",
        antialias=True,
    )
    assert (found.int() - expected[0].int()).abs().max() <= 1


def test_orientation_in_xmp_turns_training_images_too():
    packet = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    packet += (
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    )
    plain = encoded(photo(64, 48))
    segment = b"http://ns.adobe.com/xap/1.0/\x00" + packet
    content = plain[:2] + b"\xff\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + plain[2:]
    assert decode_image(content).shape == (3, 64, 48)
    assert torch.equal(decode_crop(content, whole, (64, 48)), decode_image(content))


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_jpeg_much_larger_than_needed_is_decoded_smaller(scale, monkeypatch):
    """And looks the same as one that was decoded whole, to a person and nearly to a machine."""
    from vitrail.data.transforms import decode as module

    content = encoded(photo(1280, 960), quality=92)
    sizes = []
    plain = module.decode_rectangle

    def spy(*arguments):
        found = plain(*arguments)
        sizes.append(found.shape[:2])
        return found

    monkeypatch.setattr(module, "decode_rectangle", spy)
    side = 800 // scale
    found = decode_crop(content, lambda *_: (80, 160, 800, 960), (side, side * 6 // 5))
    assert sizes == [(800 // scale, 960 // scale)]
    exact = torch.nn.functional.interpolate(
        decode_image(content)[None, :, 80:880, 160:1120], size=(side, side * 6 // 5), mode="bilinear", antialias=True
    )[0]
    difference = (found.float() - exact.float()).abs().mean()
    assert difference < 3  # of 255: another filter, no more
    assert (found[..., 1:].float() - exact[..., :-1].float()).abs().mean() > 3 * difference  # a pixel beside would be


def test_one_that_is_hardly_larger_is_not():
    content = encoded(photo(), quality=92)
    found = decode_crop(content, lambda *_: (0, 0, 200, 200), (110, 110))
    exact = torch.nn.functional.interpolate(
        decode_image(content)[None, :, :200, :200].contiguous(memory_format=torch.channels_last),
        size=(110, 110),
        mode="bilinear",
        antialias=True,
    )[0]
    assert torch.equal(found, exact)


# Modes


def test_sixteen_bits_keep_their_upper_half():
    values = np.array([[0, 255, 256], [4095, 32768, 65535]], dtype=np.uint16)
    content = encoded(Image.fromarray(values), "PNG")
    assert decode_image(content)[0].tolist() == [[0, 0, 1], [15, 128, 255]]
    assert torch.equal(decode_image(content)[0], decode_image(content)[2])


def test_sixteen_bits_in_tiff():
    values = np.array([[0, 65535], [25600, 51200]], dtype=np.uint16)
    assert decode_image(encoded(Image.fromarray(values), "TIFF"))[1].tolist() == [[0, 255], [100, 200]]


def test_transparent_pixels_lie_on_white():
    clear = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    clear.putpixel((1, 0), (200, 0, 0, 0))
    assert decode_image(encoded(clear, "PNG"))[:, 0].T.tolist() == [[200, 0, 0], [255, 255, 255]]
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert decode_image(encoded(half, "PNG"))[:, 0, 0].tolist() == [127] * 3
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert decode_image(encoded(palette, "PNG", transparency=0))[:, 0].T.tolist() == [[255, 255, 255], [40, 50, 60]]
    assert decode_image(encoded(palette, "PNG"))[:, 0].T.tolist() == [[10, 20, 30], [40, 50, 60]]
    grey = Image.new("LA", (1, 1), (100, 255))
    assert decode_image(encoded(grey, "PNG"))[:, 0, 0].tolist() == [100] * 3


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr"])
def test_other_modes(mode):
    kind = "TIFF" if mode == "YCbCr" else "JPEG" if mode in ("L", "CMYK") else "PNG"
    content = encoded(photo().convert(mode), kind, **({"quality": 95} if kind == "JPEG" else {}))
    found = decode_image(content)
    assert found.shape == (3, 240, 320)
    assert torch.equal(found, pixels(Image.open(io.BytesIO(content)).convert("RGB")))
    colours = mode in ("CMYK", "YCbCr", "P")
    reference = pixels(photo()) if colours else pixels(photo().convert("L").convert("RGB"))
    if mode != "1":
        assert (found.float() - reference.float()).abs().mean() < 20  # not its negative
    assert decode_crop(content, whole, (24, 32)).shape == (3, 24, 32)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_such_numbers_have_no_range(dtype):
    content = encoded(Image.fromarray(np.array([[0.5, 7.0]]).astype(dtype)), "TIFF")
    with pytest.raises(vitrail.DataError, match="range"):
        decode_image(content)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_the_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    content = encoded(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    assert decode_image(content)[:, 0, 0].tolist() == [255, 0, 0]


def test_grey_is_pillows_grey():
    image = photo()
    expected = torch.from_numpy(np.array(image.convert("L")))[None]
    assert torch.equal(to_channels(pixels(image), 1), expected)
    assert to_channels(expected, 3).shape == (3, 240, 320)
    with pytest.raises(vitrail.DataError, match=r"3 channels.*4"):
        to_channels(pixels(image), 4)


def test_conversion_in_strips_is_that_of_the_whole(monkeypatch):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 17, 4), dtype=np.uint8))
    palette = image.convert("RGB").quantize(40)
    palette.info["transparency"] = bytes(range(0, 240, 6))
    images = [image, image.convert("LA"), palette]
    whole = [to_rgb(each) for each in images]
    grey = to_channels(pixels(whole[0]), 1)
    for size in (1, 17, 100):
        monkeypatch.setattr("vitrail.data.transforms.decode.STRIP_PIXELS", size)
        assert [to_rgb(each).tobytes() for each in images] == [each.tobytes() for each in whole]
        assert torch.equal(to_channels(pixels(whole[0]), 1), grey)


def test_a_colour_profile_does_not_stop_it():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert decode_image(encoded(photo(), icc_profile=profile)).shape == (3, 240, 320)


# What is broken


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is large and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def huge_jpeg() -> bytes:
    """The sizes in the header of a small JPEG, replaced."""
    content = bytearray(encoded(photo(16, 16)))
    place = content.index(b"\xff\xc0")
    content[place + 5 : place + 9] = struct.pack(">HH", 60000, 60000)
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "empty"),
        (b"hello, world", "not an image of a known kind"),
        (b"<html></html>", "not an image of a known kind"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known kind"),
        (bomb(12000, 10000), "12000×10000 pixels, more than the 100,000,000 allowed"),
        (bomb(60000, 60000), "more than 100,000,000 pixels"),
        (huge_jpeg(), "more than"),
        (b"\xff\xd8\xff", "not an image|damaged"),
    ],
)
def test_what_is_no_image(content, sentence):
    with pytest.raises(vitrail.DataError, match=sentence):
        decode_image(content)
    with pytest.raises(vitrail.DataError, match=sentence):
        decode_crop(content, whole, (8, 8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_cut_short_anywhere_is_an_error_or_an_image(kind):
    content = encoded(photo(64, 48), kind)
    assert decode_image(content).shape == (3, 48, 64)
    reasons = []
    for length in range(0, len(content), max(len(content) // 60, 1)):
        for read in (decode_image, lambda c: decode_crop(c, whole, (16, 16))):
            try:
                read(content[:length])
            except vitrail.DataError as error:
                reasons.append(str(error))
    assert len(reasons) > 60
    assert not any("\n" in reason for reason in reasons)


def test_sizes():
    check_size(10, 10, 100)
    with pytest.raises(vitrail.DataError, match=r"11×10.*100"):
        check_size(10, 11, 100)
    strip = decode_image(encoded(Image.new("RGB", (20000, 10), "red"), "PNG"))
    assert strip.shape == (3, 10, 20000)
    assert to_rgb(Image.new("RGB", (1, 1))).size == (1, 1)
