"""nvcc's PTX of the WKV6 kernels as C++ for the emulated thread block: what the compiler made of the kernels' source.

The emulator alone runs the source as g++ understands it. PTX has what only nvcc sees: the inline instructions with the
registers that they got, and the loads, stores and barriers in the order that its optimiser left them in. Each kernel
becomes a function of the same instructions, one C++ statement each; every access to memory is checked as in
emulator/wkv6_checks.cpp. What is left to a GPU is ptxas. Only instructions that these kernels use are known.
"""

from __future__ import annotations

import re

PRELUDE = """#include "wkv6_cuda_plan.h"
#include "wkv6_ptx.h"
namespace {
"""
TYPES = {"p": "bool", "rs": "uint16_t", "r": "uint32_t", "f": "float", "rd": "uint64_t"}
KINDS = {
    **{f"b{n}": f"uint{n}_t" for n in (16, 32, 64)},
    **{f"u{n}": f"uint{n}_t" for n in (16, 32, 64)},
    **{f"s{n}": f"int{n}_t" for n in (16, 32, 64)},
    "f32": "float",
    "pred": "bool",
}
SPECIAL = {"%tid.x": "threadIdx.x", "%ntid.x": "blockDim.x", "%ctaid.x": "blockIdx.x", "%ctaid.y": "blockIdx.y"}
BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "mul": "*", "mul.lo": "*", "div": "/", "rem": "%"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Kernel:
    """One .entry: its name and its statements in C++."""

    def __init__(self, name: str, body: str, parameter_bytes: int) -> None:
        self.name = name
        self.parameter_bytes = parameter_bytes
        self.lines: list[str] = []
        for prefix, count in re.findall(r"\.reg \.\w+\s+%(\w+)<(\d+)>;", body):
            names = ", ".join(f"{prefix}{i} = 0" for i in range(1, int(count)))
            self.lines.append(f"{TYPES[prefix]} {names};")
        for line in body.splitlines():
            text = line.split("//")[0].strip()
            if label := re.fullmatch(r"(\$\w+):", text):
                self.lines.append(f"{self.label(label[1])}:;")
            elif text and not text.startswith("."):
                self.instruction(text.rstrip(";").strip())

    @staticmethod
    def label(name: str) -> str:
        return name.replace("$", "")

    def read(self, operand: str, kind: str) -> str:
        """An operand as a value of the C++ type `kind`."""
        operand = operand.strip()
        if operand in SPECIAL:
            return f"{kind}({SPECIAL[operand]})"
        if register := re.fullmatch(r"%([a-z]+)(\d+)", operand):
            return f"as<{kind}>({register[1]}{register[2]})"
        if re.fullmatch(r"0f[0-9A-F]{8}", operand):
            return f"as<{kind}>(0x{operand[2:]}u)"
        if re.fullmatch(r"-?\d+", operand):
            return f"{kind}({operand})"
        if operand.endswith("_param_0"):
            return f"{kind}(parameters)"
        if operand.endswith("wkv6_shared_memoryE"):
            return f"{kind}(0)"
        if operand.endswith("kAllTablesE"):
            return f"{kind}(reinterpret_cast<uint64_t>(tables))"
        raise ValueError(f"operand {operand}")

    def write(self, operand: str, value: str) -> None:
        register = re.fullmatch(r"%([a-z]+)(\d+)", operand.strip())
        self.lines.append(f"{register[1]}{register[2]} = as<{TYPES[register[1]]}>({value});")

    def address(self, operand: str, space: str) -> str:
        base, sign, offset = re.fullmatch(r"\[([^+\]-]+)(?:([+-]+)(\d+))?\]", operand.strip()).groups()
        offset = f" {(sign or '+')[-1]} {offset or 0}"
        if space == "shared":
            return f"emulator::shared + uint32_t({self.read(base, 'uint32_t')}{offset})"
        return f"reinterpret_cast<char*>({self.read(base, 'uint64_t')}{offset})"

    def instruction(self, text: str) -> None:
        """Append the statement for one instruction."""
        condition = ""
        if guarded := re.match(r"@(!?)%p(\d+)\s+", text):
            condition = f"if ({guarded[1]}p{guarded[2]}) "
            text = text[guarded.end() :]
        name, _, rest = text.partition(" " if "\t" not in text else "\t")
        name = name.strip()
        operands = [word.strip() for word in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if word.strip()]
        parts = name.split(".")
        kind = KINDS.get(parts[-1], "")
        if parts[0] == "bra":
            self.lines.append(f"{condition}goto {self.label(operands[0])};")
            return
        if condition:
            raise ValueError(f"predicated {name}")
        vectors = [[word.strip() for word in operand[1:-1].split(",")] for operand in operands if operand[0] == "{"]
        if parts[0] == "ret":
            self.lines.append("return;")
        elif name == "bar.sync":
            self.lines.append("emulator::block_barrier();")
        elif name == "bar.warp.sync":
            self.lines.append("emulator::warp_barrier(emulator::kSyncwarp);")
        elif parts[0] in ("ld", "st"):
            self.access(parts, operands, kind)
        elif parts[0] == "ldmatrix":
            values = ", ".join(f"r{register[2:]}" for register in vectors[0])
            transposed = "true" if "trans" in parts else "false"
            address = self.read(operands[1][1:-1], "uint32_t")
            self.lines.append(
                f"{{ uint32_t out[4]; emulator::load_matrices(out, {address}, {transposed}); set(out, {values}); }}"
            )
        elif parts[0] == "stmatrix":
            values = ", ".join(self.read(register, "uint32_t") for register in vectors[0])
            address = self.read(operands[0][1:-1], "uint32_t")
            self.lines.append(f"{{ const uint32_t in[4] = {{{values}}}; emulator::store_matrices({address}, in); }}")
        elif parts[0] == "mma":
            depth = int(parts[3].split("k")[1])
            out = ", ".join(f"f{register[2:]}" for register in vectors[0])
            a, b = ([self.read(register, "uint32_t") for register in vector] for vector in vectors[1:3])
            c = [self.read(register, "float") for register in vectors[3]]
            self.lines.append(
                f"{{ const uint32_t a[4] = {{{', '.join(a)}}}; const float c[4] = {{{', '.join(c)}}}; float out[4]; "
                f"emulator::multiply_matrices(out, {depth}, a, {b[0]}, {b[1] if depth == 16 else '0u'}, c); "
                f"set(out, {out}); }}"
            )
        elif parts[0] == "shfl":
            to = operands[0].split("|")[0]
            value, lane = self.read(operands[1], "uint32_t"), self.read(operands[2], "int")
            assert parts[2] in ("bfly", "idx")
            source = f"emulator::block->current ^ {lane}" if parts[2] == "bfly" else lane
            self.write(to, f"__shfl_sync({self.read(operands[4], 'uint32_t')}, {value}, {source})")
        elif parts[0] == "movmatrix":
            self.write(operands[0], f"transposed_matrix({self.read(operands[1], 'uint32_t')})")
        elif parts[0] == "prefetch":
            self.lines.append(f"emulator::prefetch({self.address(operands[0], 'global')}, 1);")
        elif parts[0] == "setp":
            left, right = (self.read(operand, kind) for operand in operands[1:])
            self.write(operands[0], f"{left} {COMPARE[parts[1]]} {right}")
        else:
            self.write(operands[0], self.value(name, parts, kind, operands[1:]))

    def access(self, parts: list[str], operands: list[str], kind: str) -> None:
        space, is_load = parts[1], parts[0] == "ld"
        memory, value = (operands[1], operands[0]) if is_load else operands
        registers = [word.strip() for word in value.strip("{}").split(",")]
        address, vector = self.address(memory, space), f"Vector<{kind}, {len(registers)}>"
        if is_load:
            self.lines.append(f"{{ const {vector} from = *emulator::checked<{vector}>({address});")
            for i, register in enumerate(registers):
                wide = self.wider(register, kind)  # extended by the sign of its kind
                self.write(register, f"{wide}(from.values[{i}])" if wide else f"from.values[{i}]")
            self.lines.append("}")
        else:
            values = ", ".join(
                self.convert(register, kind) if self.wider(register, kind) else self.read(register, kind)
                for register in registers
            )
            self.lines.append(f"*emulator::checked<{vector}>({address}) = {vector}{{{{{values}}}}};")

    def wider(self, register: str, kind: str) -> str | None:
        """The type of an integer register that has more bits than `kind`."""
        name = re.match(r"%(rd|rs|r)\d", register)
        bits = {"rs": 16, "r": 32, "rd": 64}[name[1]] if name and kind != "float" else 0
        return TYPES[name[1]] if name and bits > int(re.search(r"\d+|$", kind)[0] or 64) else None

    def value(self, name: str, parts: list[str], kind: str, operands: list[str]) -> str:
        """The value of an instruction that only computes."""
        if name in ("mul.wide.s32", "mul.wide.u32"):
            wide = kind.replace("32", "64")
            return f"{wide}({self.read(operands[0], kind)}) * {wide}({self.read(operands[1], kind)})"
        if parts[0] == "cvt":
            if name == "cvt.rn.bf16x2.f32":
                return f"pack_bf16({self.read(operands[0], 'float')}, {self.read(operands[1], 'float')})"
            if name == "cvt.f32.f16":
                return f"wkv6::half_to_float({self.read(operands[0], 'uint16_t')})"
            if name == "cvt.rn.f16.f32":
                return f"uint16_t(wkv6::float_to_half({self.read(operands[0], 'float')}))"
            return f"{KINDS[parts[1]]}({self.convert(operands[0], kind)})"
        if name == "fma.rn.bf16x2":
            return f"fma_bf16({', '.join(self.read(operand, 'uint32_t') for operand in operands)})"
        if name == "selp." + parts[-1]:
            yes, no = (self.read(operand, kind) for operand in operands[:2])
            return f"{self.read(operands[2], 'bool')} ? {yes} : {no}"
        if name in ("bfi.b32", "prmt.b32"):
            values = ", ".join(self.read(operand, "uint32_t") for operand in operands)
            return f"{'insert_bits' if parts[0] == 'bfi' else 'permute_bytes'}({values})"
        values = [self.read(operand, kind) for operand in operands]
        if parts[0] in ("mov", "cvta"):
            return values[0]
        if parts[0] == "ex2":
            return f"wkv6::exp2_fast({values[0]})"
        if name == "min.NaN.f32":
            return f"wkv6::min_or_nan({values[0]}, {values[1]})"
        if parts[0] in ("min", "max"):
            return f"std::{parts[0]}<{kind}>({values[0]}, {values[1]})"
        if name == "fma.rn.f32":
            return f"fmaf({', '.join(values)})"
        if name.startswith("mad.lo."):
            return f"{values[0]} * {values[1]} + {values[2]}"
        if parts[0] == "neg":
            return f"-{values[0]}"
        if parts[0] == "not":
            return f"{'!' if kind == 'bool' else '~'}{values[0]}"
        if parts[0] in ("shl", "shr"):
            return f"{kind}({values[0]} {'<<' if parts[0] == 'shl' else '>>'} {self.read(operands[1], 'uint32_t')})"
        symbol = BINARY.get(".".join(parts[:-1]))
        if symbol is None:
            raise ValueError(f"instruction {name}")
        return f"{kind}({values[0]} {symbol} {values[1]})"

    def convert(self, operand: str, kind: str) -> str:
        """The low bits of an integer register as `kind`."""
        register = re.fullmatch(r"%([a-z]+)(\d+)", operand)
        return f"{kind}({register[1]}{register[2]})"

    def text(self) -> str:
        body = "\n".join(self.lines)
        return (
            f"void {self.name}(const wkv6::Job& job) {{\n"
            f'static_assert(sizeof job == {self.parameter_bytes}, "");\n'
            f"const uint64_t parameters = reinterpret_cast<uint64_t>(&job);\n{body}\n}}\n"
        )


def to_cpp(ptx: str, wanted: str, types: tuple[str, str]) -> str:
    """C++ for the entries of `ptx` whose name matches the pattern `wanted`, and the launches that call them.

    Args:
        ptx: nvcc's output for one pair of element types.
        wanted: pattern of names in the form of kernel_name(); a launch of another kernel is an error.
        types: the pair, such as ("Bfloat16", "Float32").
    """
    out = [PRELUDE]
    tables = re.search(r"\.align (\d+) \.b8 \w*kAllTablesE\[2048\] = \{([^}]*)\}", ptx)
    if tables:
        out.append(f"alignas({tables[1]}) const uint8_t tables[2048] = {{{tables[2]}}};\n")
    names = []
    for match in re.finditer(r"\.visible \.entry (\w+)\(\s*\.param [^\n]*\[(\d+)\]\s*\)[^{]*\{(.*?)\n\}", ptx, re.S):
        name = kernel_name(match[1])
        if re.fullmatch(wanted, name):
            out.append(Kernel(name, match[3], int(match[2])).text())
            names.append(name)
    out.append("}  // namespace\nnamespace wkv6 {\n")
    for direction in ("forward", "backward"):
        out.append(f"template <> int launch_{direction}<{', '.join(types)}>(const Job& job, const Plan& plan) {{\n")
        out.append("const int heads = job.params.B * job.params.H;\n")
        is_backward = direction == "backward"
        kernels = [re.fullmatch(r"(\w+)_kernel_(\d)_(\d)(?:_(\d))?", name) for name in names]
        for kernel in kernels:
            kind, blocks, flag, groups = kernel.groups()
            if kind == "states" and flag == str(int(is_backward)):
                wanted_groups = f"with_groups<{blocks}>(plan.groups, [](auto groups) {{ return int(groups); }})"
                out.append(
                    f"if (plan.chunks > 1 && plan.blocks == {blocks} && {wanted_groups} == {groups}) "
                    f"if (const int error = emulator::launch({kernel[0]}, {1 + is_backward} * heads, 1, "
                    f"32 * {blocks}, plan.states_shared_bytes, job)) return error;\n"
                )
        out.append("const auto launch_chunks = [&](int blocks, int first, int count) {\n")
        out.append("Job part = job;\npart.first_chunk = first;\n")
        for kernel in kernels:
            kind, blocks, flag, _ = kernel.groups()
            if kind == direction:
                out.append(
                    f"if (plan.chunked() == {flag} && blocks == {blocks}) return emulator::launch({kernel[0]}, heads, "
                    f"count, 32 * {blocks}, plan.shared_bytes, part);\n"
                )
        out.append("return 2;\n};\n")
        out.append("const int full = plan.chunks - (plan.last_blocks < plan.blocks);\n")
        out.append("if (const int error = full ? launch_chunks(plan.blocks, 0, full) : 0) return error;\n")
        out.append("return full < plan.chunks ? launch_chunks(plan.last_blocks, full, 1) : 0;\n}\n")
    out.append("}  // namespace wkv6\n")
    return "".join(out)


def kernel_name(mangled: str) -> str:
    """Such as backward_kernel_5_0: blocks, whether chunked; states_kernel_4_1_5: blocks, whether backward, groups."""
    name = re.search(r"\d+((?:forward|backward|states)_kernel)I", mangled)[1]
    blocks, flag, groups = re.search(r"Li(\d)ELb(\d)E(?:Li(\d)E)?", mangled).groups()
    return f"{name}_{blocks}_{flag}" + (f"_{groups}" if groups else "")
