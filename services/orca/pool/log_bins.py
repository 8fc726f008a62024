"""Log-scaled bins of whole numbers: one rule, in Python and in Lua.

Small numbers have a bin each. From there on each octave (16 to 31, 32 to 63, ...) has as many bins of equal width, so
the width of a bin is a bounded share of its numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogBins:
    """Bins in which numbers of up to `exact_bits` bits have a bin each; each octave above has `2^(exact_bits-1)`."""

    exact_bits: int

    @property
    def bins_of_octave(self) -> int:
        return 1 << self.exact_bits - 1

    def bin_of(self, number: int) -> int:
        """Return the bin of a number, 0 or more."""
        shift = max(0, number.bit_length() - self.exact_bits)
        return self.bins_of_octave * shift + (number >> shift)

    def bounds_of(self, bin_number: int) -> tuple[int, int]:
        """Return the smallest and the largest number of a bin."""
        shift = max(0, bin_number // self.bins_of_octave - 1)
        first = bin_number - self.bins_of_octave * shift
        return first << shift, (first + 1 << shift) - 1

    def lua(self, name: str) -> str:
        """Return `bin_of` under a name of its own, for the head of each script."""
        return f"""\
local function {name}(number)
  local _, bits = math.frexp(number)
  local shift = math.max(0, bits - {self.exact_bits})
  return {self.bins_of_octave} * shift + math.floor(number / 2 ^ shift)
end
"""
