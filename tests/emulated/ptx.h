// PTX as the machine runs it: functions of decoded instructions.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::emulated {

enum class Type : uint8_t {
  kNone,
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kF16,
  kBf16,
  kB32,
  kU32,
  kS32,
  kF32,
  kB64,
  kU64,
  kS64,
  kF64,
  kF16x2,
  kBf16x2,
  kU16x2,
  kS16x2,
  kE4m3x2,
  kE5m2x2,
  kB128,
};
Type type_of(std::string_view name);  // kNone: no type
int bytes_of(Type type);

// Where memory operands point. kLane: memory of each lane by itself (.local, and .param of calls).
enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLane, kParam };

struct Operand {
  enum Kind : uint8_t {
    kNone,      // also the sink "_"
    kRegister,  // `at`: its slot; `wide`: 64 bits
    kPredicate,
    kConstant,  // of the function; 64 bits each
    kSpecial,   // of the warp: %tid.x and its kind
    kAddress,   // [register or symbol + offset]
    kVector,    // {...}: operands [at, at + count) of the function
    kSymbol,    // a name's address
    kLabel,     // `at`: the instruction's number
  };
  Kind kind = kNone;
  bool wide = false, negated = false;
  Space space = Space::kGeneric;  // of a symbol
  uint8_t count = 0;
  int32_t at = 0;
  int64_t offset = 0;    // of an address; a symbol's place
  uint8_t base = kNone;  // of an address: kRegister, kSymbol or kConstant
};

struct Step;
struct Instruction;
using Handler = void (*)(Step& step, const Instruction& instruction);

struct Instruction {
  Handler run = nullptr;
  int32_t guard = -1;  // a predicate
  bool guard_negated = false;
  uint8_t count = 0;          // operands
  Type type = Type::kNone;    // the last type of its name: of what is read
  Type result = Type::kNone;  // the first one
  uint8_t lanes = 1;          // .v2, .v4, .x2, .x4
  Space space = Space::kGeneric;
  int32_t first = 0;      // operand of the function
  int32_t extra = 0;      // what the handler decoded from the name
  uint32_t where = 0;     // of Function::places
  std::string_view name;  // "add.s32"
};

// A line of source.
struct Place {
  uint32_t file = 0, line = 0, inlined_file = 0, inlined_line = 0;
};

struct Variable {
  Space space = Space::kGlobal;
  int64_t offset = 0;  // in its space; an address for globals
  size_t bytes = 0, align = 1;
};

// Bytes of shared memory in front of a block's own.
inline constexpr size_t kSystemShared = 1024;

struct Function {
  std::string name;
  bool is_kernel = false;
  std::vector<Instruction> code;
  std::vector<Operand> operands;
  std::vector<uint64_t> constants;
  std::vector<uint32_t> constant_lanes;  // each as 32 lanes of 64 bits, then of 32 bits
  std::vector<Place> places;
  // Parameters in the order of the declaration, then the result's: of a kernel in its buffer, of a
  // function in each lane's memory.
  std::vector<Variable> parameters, results;
  size_t parameter_bytes = 0;
  size_t lane_bytes = 0;  // of each lane: parameters, calls' parameters, locals
  // Where its static shared memory ends. The first bytes belong to the system, so that 0 is no
  // address.
  size_t shared_bytes = kSystemShared;
  int slots = 0;  // of 32 lanes of 32 bits
  int predicates = 0;
  uint32_t cluster[3] = {0, 0, 0};  // .reqnctapercluster
  // Of each register: whether it has 64 bits, and whether its slot is its own.
  std::vector<uint8_t> register_wide, register_kept;
};

// The text of a module, with its functions as they are needed.
struct Program {
  explicit Program(std::string_view text);
  const Function& function(std::string_view name);
  bool has(std::string_view name) const { return bodies.count(std::string(name)) > 0; }

  struct Body {
    std::string_view header, body;
    bool is_kernel;
  };
  std::string_view text;
  std::map<std::string, Body> bodies;
  std::map<std::string, std::unique_ptr<Function>> functions;
  std::map<std::string, Variable> globals;
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::map<uint32_t, std::string> files;
};

// Reads the text of a function.
void read_function(Program& program, Function& function, const Program::Body& text);

// Gives registers that are not in use at the same time the same slots.
void assign_slots(Function& function);

// The handler of an instruction by its name; null if there is none. It may set `extra`.
Handler find_arithmetic(Instruction& instruction, const Function& function);
Handler find_bits(Instruction& instruction, const Function& function);
Handler find_conversion(Instruction& instruction, const Function& function);
Handler find_access(Instruction& instruction, const Function& function);
Handler find_control(Instruction& instruction, const Function& function);
Handler find_together(Instruction& instruction, const Function& function);

// The part of a name between dots, by its number; whether one of them is `what`.
std::string_view part_of(std::string_view name, int number);
bool has_part(std::string_view name, std::string_view what);

}  // namespace winnow::emulated
