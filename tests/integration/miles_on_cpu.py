"""What miles needs beside rank_on_cpu: numpy's version, and what is not called: servers and their arguments."""

import absent
import numpy
import torch

absent.stand_in("deep_ep", "mooncake", "sglang", "sglang_router", "torch_memory_saver")
numpy.__version__ = "1.26.4"  # miles refuses 2, with which all of this runs


def parse(words):
    """miles' own arguments, in fp32 and without those of its servers."""
    import sys

    from miles.backends.megatron_utils import arguments as of_megatron
    from miles.utils import arguments, dumper_utils

    def fp32(args):
        default(args)
        args.bf16 = args.fp16 = False
        args.params_dtype = torch.float32
        return args

    default, of_megatron.set_default_megatron_args = of_megatron.set_default_megatron_args, fp32
    arguments.RouterArgs.add_cli_args = staticmethod(lambda parser, **options: parser)
    arguments.add_sglang_arguments = lambda parser: parser
    arguments.sglang_validate_args = arguments.hf_validate_args = lambda *args: None
    dumper_utils.DumperConfig._kv_pairs_to_dict = staticmethod(lambda raw: {})
    sys.argv = ["miles", *words]
    return arguments.parse_args()
