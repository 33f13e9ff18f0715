-- What an answer says of its tokens: objects in JSON, or in the events of a stream, kept as text in dynamic metadata.
--
-- It looks at each piece of a body as it passes, and holds nothing up. `depth` is how many objects and lists are open.
-- Strings are skipped, so that nothing a prompt or an answer says is taken for a field.

local find, match, sub, byte = string.find, string.match, string.sub, string.byte

-- Bytes of the largest object that is taken, and of the longest event that is read: the last one of /v1/responses has
-- the whole answer in it.
local MOST_USAGE, MOST_EVENT = 4096, 1048576
-- Objects that may have a usage of their own in them.
local PARENTS = { response = true, message = true }

local function may_be_usage(text)
  return sub('"usage"', 1, #text) == text or find(text, '^"usage"%s*:?%s*$') or find(text, '^"usage"%s*:%s*{')
end

-- The usage of one JSON text, of which `pieces` returns one after another; before it, whose it is.
local function usage_of(pieces)
  local depth, in_string, rest, key, parent = 0, false, "", nil, nil
  for piece in pieces do
    local text, at = rest .. piece, 1
    rest = ""
    while at <= #text do
      local stop = find(text, in_string and '["\\]' or '["{}%[%]]', at)
      if not stop then break end
      local found = byte(text, stop)
      at = stop + 1
      if in_string then
        if found == 34 then in_string = false
        elseif at > #text then rest = "\\"
        else at = at + 1 end
      elseif found == 34 then
        in_string = true
        if depth == 1 or (depth == 2 and PARENTS[parent]) then
          local whole = match(text, '^"usage"%s*:%s*(%b{})', stop)
          if whole then return depth == 1 and "usage" or parent, whole end
          if #text - stop < MOST_USAGE and may_be_usage(sub(text, stop, stop + MOST_USAGE)) then
            rest, in_string = sub(text, stop), false
            break
          end
          if depth == 1 then key = match(text, '^"(%l+)"%s*:%s*{', stop) end
        end
      elseif found == 123 or found == 91 then
        depth = depth + 1
        if depth == 2 then parent, key = key, nil end
      else
        depth = depth - 1
      end
    end
  end
end

local function once(text)
  return function()
    local whole = text
    text = nil
    return whole
  end
end

-- Of an event: what our engine has counted so far, which it says at the end; or else what the API has.
local function usage_of_event(line)
  local counted = match(line, '"stoker_usage":(%b{})}%s*$')
  if counted then return "stoker_usage", counted end
  if find(line, '"usage"%s*:%s*{') then return usage_of(once(line)) end
end

local function read_events(pieces, keep)
  local parts, size = {}, 0
  for piece in pieces do
    local last = {}
    local at = 1
    while true do
      local stop = find(piece, "\n", at, true)
      local part = sub(piece, at, stop or #piece)
      size = size + #part
      if size <= MOST_EVENT then parts[#parts + 1] = part end
      if not stop then break end
      if size <= MOST_EVENT then
        local line = table.concat(parts)
        if sub(line, 1, 5) == "data:" then
          local whose, usage = usage_of_event(line)
          if whose then last[whose] = usage end
        end
      end
      parts, size, at = {}, 0, stop + 1
    end
    for whose, usage in pairs(last) do keep(whose, usage) end
  end
end

function envoy_on_response(answer)
  local headers = answer:headers()
  local kind = string.lower(headers:get("content-type") or "")
  if headers:get("content-encoding") then return end
  local chunks = answer:bodyChunks()
  local function pieces()
    local chunk = chunks()
    return chunk and chunk:getBytes(0, chunk:length())
  end
  local function keep(whose, usage)
    if #usage <= MOST_USAGE then answer:streamInfo():dynamicMetadata():set("stoker.usage", whose, usage) end
  end
  if find(kind, "^application/json") then
    local whose, usage = usage_of(pieces)
    if whose then keep(whose, usage) end
  elseif find(kind, "^text/event%-stream") then
    read_events(pieces, keep)
  end
end
