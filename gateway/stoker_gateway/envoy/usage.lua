-- Copies the token usage in a response to dynamic metadata, as JSON text. The usage is an object in a JSON body or in
-- the events of a stream.
--
-- The script scans each chunk of the body as it passes, without delaying it. `depth` is the number of open objects and
-- lists. Strings are skipped, so that text of a prompt or an output is not mistaken for a field.

local find, match, sub, byte, gsub = string.find, string.match, string.sub, string.byte, string.gsub

-- Maximum bytes of a usage object, and of an event's line. Longer ones are ignored. The last event of /v1/responses
-- contains the whole response.
local MAX_USAGE, MAX_EVENT = 4096, 1048576
-- Top-level objects that may contain a usage.
local PARENTS = { response = true, message = true }
-- Fields with prompt tokens, fields with output tokens, and objects with the number of cached tokens.
local OF_PROMPT = { "prompt_tokens", "input_tokens", "cached_tokens", "cache_read_input_tokens",
  "cache_creation_input_tokens" }
local OF_OUTPUT = { "completion_tokens", "output_tokens" }
local DETAILS = { "prompt_tokens_details", "input_tokens_details" }
-- Types of events before the output begins.
local EARLY = { ["response.created"] = true, ["response.in_progress"] = true, ["response.queued"] = true,
  message_start = true, ping = true }

local function number(text, name)
  local value = tonumber(match(text, '"' .. name .. '"%s*:%s*(%d[%d.eE+]*)') or "")
  if value and value < 2147483648 then return value end
end

-- Merges a usage into the known counts. Prompt counts never decrease, because a later usage may report 0. A usage with
-- prompt fields but without any count above 0 is ignored.
local function add(known, usage)
  local flat = gsub(gsub(sub(usage, 2, -2), "%b{}", "{}"), "%b[]", "[]")
  local reported, some = {}, false
  for _, name in ipairs(OF_PROMPT) do reported[name] = number(flat, name) end
  local of_prompt = next(reported)
  for _, name in ipairs(OF_OUTPUT) do reported[name] = number(flat, name) end
  for _, name in ipairs(DETAILS) do
    local details = match(usage, '"' .. name .. '"%s*:%s*(%b{})')
    reported[name] = details and number(details, "cached_tokens")
  end
  for _, value in pairs(reported) do some = some or value > 0 end
  if of_prompt and not some then return end
  for name, value in pairs(reported) do
    local of_output = name == "completion_tokens" or name == "output_tokens"
    if of_output or value > (known[name] or -1) then known[name] = value end
  end
end

local function as_json(known)
  local fields = {}
  for name, value in pairs(known) do
    local text = string.format("%.0f", value)
    if name == DETAILS[1] or name == DETAILS[2] then text = '{"cached_tokens":' .. text .. '}' end
    fields[#fields + 1] = '"' .. name .. '":' .. text
  end
  return "{" .. table.concat(fields, ",") .. "}"
end

-- Whether an incomplete text may be the start of a field with this name whose value is an object.
local function may_be(name, text)
  local key = '"' .. name .. '"'
  return sub(key, 1, #text) == text or find(text, '^' .. key .. '%s*:?%s*$') or find(text, '^' .. key .. '%s*:%s*{')
end

-- Scans a JSON text whose chunks `pieces` returns one after another. Returns the usage's top-level field, the usage,
-- and whether an error was found before it.
local function usage_of(pieces)
  local depth, in_string, rest, key, parent, is_error = 0, false, "", nil, nil, false
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
          if whole and find(whole, "%d") then return depth == 1 and "usage" or parent, whole, is_error end
          local begins = not whole and #text - stop < MAX_USAGE and sub(text, stop, stop + MAX_USAGE)
          if begins and may_be("usage", begins) then
            rest, in_string = sub(text, stop), false
            break
          end
          if depth == 1 then
            if find(text, '^"error"%s*:%s*["{]', stop) then
              is_error = true
            elseif begins and #begins < 64 and may_be("error", begins) then
              rest, in_string = sub(text, stop), false
              break
            end
            key = match(text, '^"(%l+)"%s*:%s*{', stop)
          end
        end
      elseif found == 123 or found == 91 then
        depth = depth + 1
        if depth == 2 then parent, key = key, nil end
      else
        depth = depth - 1
      end
    end
  end
  return nil, nil, is_error
end

local function once(text)
  return function()
    local whole = text
    text = nil
    return whole
  end
end

-- Returns the name and the value of an event's usage field: `stoker_usage`, the counts so far, which Stoker's engine
-- writes at the end of each event, or else the API's field. Returns nothing if the event has neither.
local function usage_of_event(line)
  local counted = match(line, '"stoker_usage":(%b{})}%s*$')
  if counted then return "stoker_usage", counted end
  if find(line, '"usage"%s*:%s*{') then return usage_of(once(line)) end
end

-- Classifies an event that no output precedes: "error", "early" (not a part of the output), or nil (the output begins).
local function kind_of_event(line)
  local kind = match(line, '"type"%s*:%s*"([%l_.]+)"')
  if kind == "error" or kind == "response.failed" then return "error" end
  if EARLY[kind] or find(line, "^data:%s*%[DONE%]") then return "early" end
  if find(line, '"error"', 1, true) and select(3, usage_of(once(line))) then return "error" end
end

local function read_events(pieces, keep, fail)
  local parts, size, began = {}, 0, false
  local function read_line(last)
    local line = table.concat(parts)
    if sub(line, 1, 5) ~= "data:" then return end
    local source, usage = usage_of_event(line)
    if source == "stoker_usage" then last[source] = usage elseif source then keep(source, usage) end
    if not began then
      local kind = kind_of_event(line)
      if kind == "error" then fail() end
      began = kind ~= "early"
    end
  end
  for piece in pieces do
    local last = {}
    local at = 1
    while true do
      local stop = find(piece, "\n", at, true)
      local part = sub(piece, at, stop or #piece)
      size = size + #part
      if size <= MAX_EVENT then parts[#parts + 1] = part end
      if not stop then break end
      if size <= MAX_EVENT then read_line(last) end
      parts, size, at = {}, 0, stop + 1
    end
    for source, usage in pairs(last) do keep(source, usage) end
  end
  local last = {}
  if size > 0 and size <= MAX_EVENT then read_line(last) end  -- the last line has no line break
  for source, usage in pairs(last) do keep(source, usage) end
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local kind = string.lower(headers:get("content-type") or "")
  if headers:get("content-encoding") then return end
  local chunks = handle:bodyChunks()
  local function pieces()
    local chunk = chunks()
    return chunk and chunk:getBytes(0, chunk:length())
  end
  local all = {}
  local function keep(source, usage)
    if #usage > MAX_USAGE then return end
    local known = all[source] or {}
    add(known, usage)
    if not next(known) then return end
    all[source] = known
    handle:streamInfo():dynamicMetadata():set("stoker.usage", source, as_json(known))
  end
  local function fail()
    handle:streamInfo():dynamicMetadata():set("stoker.usage", "failed", "true")
  end
  if find(kind, "^application/json") then
    local source, usage, is_error = usage_of(pieces)
    if source then keep(source, usage) end
    if is_error and not next(all) then fail() end
  elseif find(kind, "^text/event%-stream") then
    read_events(pieces, keep, fail)
  end
end
